"""How many of the points come from outside the object?

Definition (ours): of the (at most ten) prototypes that give the predicted class most points, the share of their
points whose most active pixel lies outside the object: outside its mask, where a table names one, else outside its box;
mean over the pictures.

Limits: needs masks, or boxes and pictures that are not cropped to them (CUB with --full-images, the embedded birds). A
box holds background too, so with boxes this is the least that comes from there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from likethat.data.parts import read_mask
from likethat.metrics.figure import LOWER, About, MetricFigure
from likethat.metrics.regions import box_masks
from likethat.metrics.sweep import Batch, Metric, Subject

CROPPED = 0.95  # of the picture: an object that covers this leaves no background to tell
ABOUT = About("points from the background", LOWER, "evidence", "this project")


def objects_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return which pixels show each picture's object, B x H x W, and where that is known, B."""
    subject, size_hw = batch.subject, batch.subject.classifier.networks[0].backbone.input_size
    if batch.object_B4 is None:
        on_BHW = torch.zeros(len(batch), *size_hw, dtype=torch.bool, device=batch.device)
        known_B = on_BHW.any((1, 2))
    else:
        on_BHW = box_masks(batch.object_B4[:, None], size_hw)[:, 0]
        known_B = ~batch.object_B4[:, 0].isnan()
    for row, number in enumerate(batch.index_B.tolist()):
        sample = subject.samples[number]
        if sample.mask or sample.object_box:
            mask_HW = torch.from_numpy(read_mask(subject.root, sample, size_hw) >= 0.5)
            on_BHW[row], known_B[row] = mask_HW.to(batch.device), True
        elif sample.box:  # cropped to the object
            on_BHW[row] = known_B[row] = True
    return on_BHW, known_B


class Background(Metric):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.known = 0  # images
        self.share, self.outside = [torch.zeros(0)], [torch.zeros(0)]

    def collect(self, batch: Batch) -> None:
        on_BHW, known_B = objects_of(batch)
        self.known += int(known_B.sum())
        covered_B = on_BHW.float().mean((1, 2))
        rows = (known_B & (covered_B < CROPPED)).nonzero()[:, 0]
        if not len(rows):
            return
        points_BE = batch.evidence.points_BE[rows].clamp(min=0)
        image_S = rows.repeat_interleave(points_BE.shape[1])
        peak_S2 = batch.clean.peaks(image_S, batch.evidence.prototype_BE[rows].flatten())
        height, width = on_BHW.shape[1:]
        column_S, row_S = (peak_S2[:, 0] * width).long(), (peak_S2[:, 1] * height).long()
        outside_S = ~on_BHW[image_S, row_S.clamp(max=height - 1), column_S.clamp(max=width - 1)]
        share_B = (points_BE * outside_S.unflatten(0, points_BE.shape)).sum(1) / points_BE.sum(1)
        self.share.append(share_B.cpu())
        self.outside.append(1 - covered_B[rows].cpu())

    def figures(self) -> list[MetricFigure]:
        share_N, outside_N = torch.cat(self.share), torch.cat(self.outside)
        if not len(share_N):
            why = "is cropped to the objects" if self.known else "has neither masks nor boxes of the objects"
            return [ABOUT.absent(f"the data {why}")]
        return [ABOUT.mean(share_N, f"{len(share_N)} images; the background is {outside_N.mean():.1%} of the picture")]
