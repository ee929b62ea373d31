"""How often each prototype lands on each annotated part of the pictures of its own class."""

from __future__ import annotations

import torch
from torch import Tensor

from likethat.metrics.regions import Reading, centres
from likethat.metrics.sweep import Batch, Metric, Subject

HALF_REGION = 36 / 224  # of the picture: half the side of the square that belongs to a prototype (Huang et al. 2023)
NO_PARTS = "the data has no part annotations"


def parts_in_region(reading: Reading, image_S: Tensor, prototype_S: Tensor, part_BQ4: Tensor) -> Tensor:
    """Return, S x Q, whether the part is visible and in the square around the prototype's most active pixel."""
    peak_S2 = reading.peaks(image_S, prototype_S)
    offset_SQ2 = (centres(part_BQ4)[image_S] - peak_S2[:, None]).abs()
    return (offset_SQ2 <= HALF_REGION).all(2)


def own_parts(batch: Batch) -> Tensor:
    """Return the same for all prototypes of each image's own class, as `batch.own_pairs` lists them."""
    assert batch.part_BQ4 is not None
    return parts_in_region(batch.clean, *batch.own_pairs, batch.part_BQ4)


class PartHits(Metric):
    """What metrics of hit parts share: counts over all images seen, both P x Q."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        parts = 0 if subject.parts is None else len(subject.parts.names)
        self.hit_PQ = torch.zeros(len(subject.class_P), parts, dtype=torch.long)
        self.visible_PQ = torch.zeros_like(self.hit_PQ)

    def collect(self, batch: Batch) -> None:
        if batch.part_BQ4 is None:
            return
        image_S, prototype_S = batch.own_pairs
        inside_SQ = batch.once("own parts", own_parts)
        visible_SQ = ~batch.part_BQ4[image_S, :, 0].isnan()
        self.hit_PQ.index_add_(0, prototype_S.cpu(), inside_SQ.cpu().long())
        self.visible_PQ.index_add_(0, prototype_S.cpu(), visible_SQ.cpu().long())
