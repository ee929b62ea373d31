"""Do the prototypes of an explanation look at different places?

Definition (ours): of every picture, the boxes of the prototypes that make up its evidence: those that give the
predicted class nine tenths of its positive points, most points first, ten at most. Overlap: the intersection over union
of two such boxes, averaged over all pairs of a picture and then over the pictures; 0 is best. Cover: the share of the
picture that lies in at least one of them.

Limits: pictures whose evidence is one box have no pairs and are left out of the overlap. Boxes of one large part may
lie apart and still say the same; boxes of different parts of a small object may overlap. A model with few, small boxes
covers little, and one whose boxes are spread at random is distinct too: read it with consistency and deletion.
"""

from __future__ import annotations

import torch
from torch import Tensor

from likethat.metrics.figure import LOWER, NEITHER, About, MetricFigure
from likethat.metrics.regions import box_masks, intersection_over_union
from likethat.metrics.sparsity import MOST
from likethat.metrics.sweep import Batch, Metric, Subject

OVERLAP = About("overlap of evidence boxes (distinctness)", LOWER, "evidence", "this project")
COVER = About("picture covered by evidence boxes", NEITHER, "evidence", "this project")


def makes_up_most(points_BE: Tensor, total_B: Tensor) -> Tensor:
    """B x E: True for the first prototypes that together have MOST of the positive points; points are sorted."""
    before_BE = points_BE.cumsum(1) - points_BE
    return (points_BE > 0) & (before_BE < MOST * total_B[:, None])


def pair_overlaps(box_BE4: Tensor, counts_BE: Tensor) -> Tensor:
    """Return each picture's mean intersection over union of two boxes that count; NaN where fewer than two do."""
    first_R, second_R = torch.triu_indices(box_BE4.shape[1], box_BE4.shape[1], 1, device=box_BE4.device)
    overlap_S = intersection_over_union(box_BE4[:, first_R].flatten(0, 1), box_BE4[:, second_R].flatten(0, 1))
    both_BR = counts_BE[:, first_R] & counts_BE[:, second_R]
    return (overlap_S.unflatten(0, both_BR.shape) * both_BR).sum(1) / both_BR.sum(1)


def covered_shares(box_BE4: Tensor, counts_BE: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """Return the share of each picture's pixels in at least one box that counts."""
    return (box_masks(box_BE4, size_hw) & counts_BE[..., None, None]).any(1).float().mean((1, 2))


class Distinctness(Metric):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.overlap, self.cover, self.boxes = ([torch.zeros(0)] for _ in range(3))

    def collect(self, batch: Batch) -> None:
        if not batch.perturbed:
            return
        evidence = batch.evidence
        counts_BE = makes_up_most(evidence.points_BE, evidence.total_B)
        size_hw = self.subject.classifier.networks[0].backbone.input_size
        cover_B = covered_shares(evidence.box_BE4, counts_BE, size_hw)
        number_B = counts_BE.sum(1)
        self.overlap.append(pair_overlaps(evidence.box_BE4, counts_BE).cpu())
        self.cover.append(torch.where(number_B > 0, cover_B, torch.nan).cpu())
        self.boxes.append(number_B.float().cpu())

    def figures(self) -> list[MetricFigure]:
        boxes_N = torch.cat(self.boxes)
        note = f"{self.subject.sample_note(self.subject.perturbed)}; {boxes_N.mean():.1f} boxes a picture"
        return [OVERLAP.mean(torch.cat(self.overlap), note), COVER.mean(torch.cat(self.cover), note)]
