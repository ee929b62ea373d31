"""Do the patches most like a prototype show the same part?

Definition (Nauta et al. 2023, "PIP-Net: patch-based intuitive prototypes for interpretable image classification",
CVPR): the ten pictures most similar to a prototype, whatever their class, give one patch each: its box there, cut
down to 32/224 of the side around its middle where it is larger. Of each part, the share of those patches, out of the
pictures that show the part, in which it lies. Purity is the largest of these shares; the score is its mean over the
prototypes that a class has a positive connection to. Left and right are the same part.

Limits: a part that only one of the ten pictures shows can give 1. The patch is smaller than a cell of a 7x7 map, so a
network that finds the part but draws its box beside it scores low.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from likethat.inference.nearest import Search
from likethat.metrics.figure import HIGHER, About, MetricFigure
from likethat.metrics.part_hits import NO_PARTS
from likethat.metrics.regions import boxes_of_maps, centres
from likethat.metrics.sweep import Batch, Metric, Subject

NEAREST = 10
PATCH = 32 / 224  # of the picture: side of a patch, at most
LEAST_WEIGHT = 1e-5  # of a connection that counts
ABOUT = About("purity", HIGHER, "parts", "Nauta et al. 2023")


def trimmed(box: Tensor) -> Tensor:
    """Cut boxes (... x 4) down to the size of a patch around their middle."""
    middle, half = centres(box), ((box[..., 2:] - box[..., :2]) / 2).clamp(max=PATCH / 2)
    return torch.cat([middle - half, middle + half], -1)


def purities(patch_Pk4: Tensor, part_PkQ4: Tensor, sides: Sequence[int]) -> Tensor:
    """Return the purity of every prototype, from its patches and their pictures' parts; NaN where no part is shown."""
    point_PkQ2 = centres(part_PkQ4)
    low, high = patch_Pk4[:, :, None, :2], patch_Pk4[:, :, None, 2:]
    inside_PkQ = ((point_PkQ2 >= low) & (point_PkQ2 <= high)).all(-1)
    visible_PkQ = ~point_PkQ2[..., 0].isnan()
    merge_QG = torch.eye(max(sides) + 1)[list(sides)]
    inside_PkG, visible_PkG = (flag_PkQ.float() @ merge_QG > 0 for flag_PkQ in (inside_PkQ, visible_PkQ))
    visible_PG = visible_PkG.sum(1)
    share_PG = inside_PkG.sum(1).double() / visible_PG.clamp(min=1)
    return torch.where(visible_PG.sum(1) > 0, share_PG.amax(1), torch.nan)


class Purity(Metric):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.searches: list[Search] = []
        if subject.parts is not None:
            self.searches = [Search(network, NEAREST) for network in subject.classifier.networks]
            self.part_NQ4 = torch.full((len(subject.samples), len(subject.parts.names), 4), torch.nan)

    def collect(self, batch: Batch) -> None:
        for search, output in zip(self.searches, batch.clean.outputs, strict=False):
            search.offer(batch.index_B, output.distance_BPHW)
        if batch.part_BQ4 is not None:
            self.part_NQ4[batch.index_B] = batch.part_BQ4.cpu()

    @cached_property
    def purity_P(self) -> Tensor:
        """Return the purity of all prototypes, once all images are seen."""
        assert self.subject.parts is not None
        found = []
        for network, search in zip(self.subject.classifier.networks, self.searches, strict=True):
            nearest = search.found()
            map_SHW = network.prototype_layer.similarity.of_distance(nearest.map_PkHW.flatten(0, 1))
            box_Pk4 = boxes_of_maps(map_SHW, network.backbone.input_size).unflatten(0, nearest.image_Pk.shape)
            part_PkQ4 = self.part_NQ4[nearest.image_Pk.cpu()]
            found.append(purities(trimmed(box_Pk4).cpu(), part_PkQ4, self.subject.parts.sides))
        used_P = self.subject.weight_KP.amax(0).cpu() > LEAST_WEIGHT
        return torch.where(used_P, torch.cat(found), torch.nan)

    def figures(self) -> list[MetricFigure]:
        if self.subject.parts is None:
            return [ABOUT.absent(NO_PARTS)]
        purity_P = self.purity_P
        count = int((~purity_P.isnan()).sum())
        nearest = min(NEAREST, len(self.subject.samples))
        return [ABOUT.mean(purity_P, f"{nearest} nearest test patches of {count} prototypes")]

    def by_prototype(self) -> Mapping[str, Tensor]:
        return {} if self.subject.parts is None else {"purity": self.purity_P}
