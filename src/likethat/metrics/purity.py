"""Do the patches most like a prototype show the same part?

Definition (Nauta et al. 2023, "PIP-Net: patch-based intuitive prototypes for interpretable image classification",
CVPR, and its code): the ten training pictures most similar to a prototype, whatever their class, give one patch each:
its box there, cut down to 32 px (at 224 px; 32/224 of other sides) around its middle where it is larger, less at both
ends by the same number of whole pixels. Of each part, the share of those patches, out of the pictures that show the
part, in which it lies, rim included. Purity is the largest of these shares; the score is its mean over the prototypes
that a class has a connection above 1e-5 to. Left and right are the same part. Their code does the same with pictures
that the network was not trained on; here those are the pictures measured.

Limits: a part that only one of the ten pictures shows can give 1. The patch is smaller than a cell of a 7x7 map, so a
network that finds the part but draws its box beside it scores low. PIP-Net's patches are cells of its 26x26 map, and
its pictures are whole; here pictures are those that the run sees. A prototype's own source is among the training
pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from likethat.inference.nearest import Search
from likethat.metrics.figure import HIGHER, About, MetricFigure
from likethat.metrics.part_hits import NO_PARTS, ROUNDING
from likethat.metrics.regions import boxes_in, centres
from likethat.metrics.sweep import Batch, Metric, Subject

NEAREST = 10
SIDE, PATCH = 224, 32  # pixels: of the picture that patches are cut from, and of a patch at most
LEAST_WEIGHT = 1e-5  # of a connection that counts
NO_TRAINING_IMAGES = "the data holds other images than the run was trained on"
PURITY = About("purity", HIGHER, "parts", "Nauta et al. 2023")
UNSEEN = About("purity, pictures not trained on", HIGHER, "parts", "Nauta et al. 2023")


def trimmed(box: Tensor) -> Tensor:
    """Boxes (... x 4, in shares) cut down to the size of a patch around their middle."""
    low, high = box[..., :2] * SIDE, box[..., 2:] * SIDE
    cut = ((high - low - PATCH) / 2 + ROUNDING).floor().clamp(min=0)
    return torch.cat([low + cut, high - cut], -1) / SIDE


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


class PurityOfUnseen(Metric):
    """Purity among the images measured."""

    about = UNSEEN

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
            box_Pk4 = boxes_in(network, map_SHW).unflatten(0, nearest.image_Pk.shape)
            part_PkQ4 = self.part_NQ4[nearest.image_Pk.cpu()]
            found.append(purities(trimmed(box_Pk4).cpu(), part_PkQ4, self.subject.parts.sides))
        used_P = self.subject.weight_KP.amax(0).cpu() > LEAST_WEIGHT
        return torch.where(used_P, torch.cat(found), torch.nan)

    @property
    def why_absent(self) -> str | None:
        return NO_PARTS if self.subject.parts is None else None

    def figures(self) -> list[MetricFigure]:
        if self.why_absent:
            return [self.about.absent(self.why_absent)]
        purity_P, images = self.purity_P, len(self.subject.samples)
        count = int((~purity_P.isnan()).sum())
        seen = f"{min(NEAREST, images)} nearest of {images} {self.subject.kind} {self.subject.view_note}"
        patch = f"patches of {self.subject.pixels_note(PATCH)} at most, left and right as one"
        return [self.about.mean(purity_P, f"{count} prototypes, {seen}; {patch}")]


class Purity(PurityOfUnseen):
    """Purity among the run's training images, which is the published figure."""

    about, on_training_images = PURITY, True

    def __init__(self, subject: Subject) -> None:
        super().__init__(replace(subject, samples=subject.train, part="train"))

    @property
    def why_absent(self) -> str | None:
        return super().why_absent or (None if self.subject.samples else NO_TRAINING_IMAGES)

    def by_prototype(self) -> Mapping[str, Tensor]:
        return {} if self.why_absent else {"purity": self.purity_P}
