"""How many of the points come from outside the object?

Definition (ours): of the (at most ten) prototypes that give the predicted class most points, the share of their
points whose most active pixel lies outside the object's box; mean over the pictures.

Limits: needs the object's box and pictures that are not cropped to it (CUB with --full-images, the embedded birds). A
box holds background too, so this is the least that comes from there.
"""

from __future__ import annotations

import torch

from likethat.metrics.figure import LOWER, About, MetricFigure
from likethat.metrics.regions import areas, distance_to_box
from likethat.metrics.sweep import Batch, Metric, Subject

CROPPED = 0.95  # of the picture: an object that covers this leaves no background to tell
ABOUT = About("points from the background", LOWER, "evidence", "this project")


class Background(Metric):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.share, self.outside = [torch.zeros(0)], [torch.zeros(0)]

    def collect(self, batch: Batch) -> None:
        if batch.object_B4 is None:
            return
        object_B4 = batch.object_B4.clamp(0, 1)
        covered_B = areas(object_B4)
        rows = (covered_B < CROPPED).nonzero()[:, 0]  # never where nothing is known
        points_BE = batch.evidence.points_BE[rows].clamp(min=0)
        most = points_BE.shape[1]
        prototype_S = batch.evidence.prototype_BE[rows].flatten()
        peak_S2 = batch.clean.peaks(rows.repeat_interleave(most), prototype_S)
        outside_S = distance_to_box(peak_S2, object_B4[rows].repeat_interleave(most, 0)) > 0
        share_B = (points_BE * outside_S.unflatten(0, points_BE.shape)).sum(1) / points_BE.sum(1)
        self.share.append(share_B.cpu())
        self.outside.append(1 - covered_B[rows].cpu())

    def figures(self) -> list[MetricFigure]:
        share_N, outside_N = torch.cat(self.share), torch.cat(self.outside)
        if self.subject.parts is None or not len(share_N):
            why = "has no boxes of the objects" if self.subject.parts is None else "is cropped to the objects"
            return [ABOUT.absent(f"the data {why}")]
        return [ABOUT.mean(share_N, f"{len(share_N)} images; the background is {outside_N.mean():.1%} of the picture")]
