"""How much does a person have to look at to follow a prediction?

Definitions: sparsity is the share of all connections that are zero (Nauta et al. 2023). A prediction uses the
prototypes whose points for the predicted class are not zero; to follow it, those that give nine tenths of all points
(their absolute values, largest first) must be looked at. Lines: prototypes of one class whose boxes show the same part
of the picture are one line of the scoring sheet; counted are the lines that give nine tenths of the positive points,
where prototypes after the first ten are one line together. Points from negative connections: their share of all points
of the predicted class, in absolute values ('this does not look like that').

Limits: duplicates count as prototypes as often as they are there, and as one line where they are found at one place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from likethat.explaining.scoring import SAME_PART
from likethat.metrics.figure import HIGHER, LOWER, About, MetricFigure
from likethat.metrics.regions import intersection_over_union
from likethat.metrics.sweep import Batch, Evidence, Metric, Subject

MOST = 0.9
GROUP = "prototypes"
SPARSITY = About("connections that are zero", HIGHER, GROUP, "Nauta et al. 2023")
USED = About("prototypes a prediction uses", LOWER, GROUP, "Nauta et al. 2023", unit="prototypes")
NEEDED = About("prototypes for nine tenths of the points", LOWER, GROUP, "this project", unit="prototypes")
LINES = About("lines for nine tenths of the points", LOWER, GROUP, "this project", unit="lines")
NEGATIVE = About("points from negative connections", LOWER, GROUP, "this project")


def needed_for_most(points_BP: Tensor) -> Tensor:
    """Return the least number of prototypes that have MOST of all points, in absolute values."""
    sorted_BP = points_BP.abs().sort(dim=1, descending=True).values
    return (sorted_BP.cumsum(1) < MOST * sorted_BP.sum(1, keepdim=True)).sum(1) + 1


def points_of_lines(evidence: Evidence, class_BE: Tensor) -> Tensor:
    """Return the points of each line of the evidence, at the place of its strongest prototype, and last those of the
    prototypes that are not among the evidence: B x (E + 1)."""
    count = class_BE.shape[1]
    shape = (len(class_BE), count, count)
    first_S4, second_S4 = (evidence.box_BE4.unsqueeze(axis).expand(*shape, 4).flatten(0, 2) for axis in (2, 1))
    overlap_BEE = intersection_over_union(first_S4, second_S4).view(shape)
    alike_BEE = (overlap_BEE >= SAME_PART) & (class_BE[:, :, None] == class_BE[:, None])
    line_BE = torch.arange(count, device=class_BE.device).repeat(len(class_BE), 1)
    leads_BE = torch.ones_like(line_BE, dtype=torch.bool)
    for number in range(1, count):
        joins_BE = alike_BEE[:, number, :number] & leads_BE[:, :number]
        leads_BE[:, number] = ~joins_BE.any(1)
        line_BE[:, number] = torch.where(leads_BE[:, number], number, joins_BE.int().argmax(1))
    points_BE = evidence.points_BE.clamp(min=0)
    rest_B1 = (evidence.total_B - points_BE.sum(1)).clamp(min=0)[:, None]
    return torch.cat([torch.zeros_like(points_BE).scatter_add(1, line_BE, points_BE), rest_B1], 1)


def negative_share(points_BP: Tensor, weight_BP: Tensor) -> Tensor:
    size_BP = points_BP.abs()
    return (size_BP * (weight_BP < 0)).sum(1) / size_BP.sum(1)


class Sparsity(Metric):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.used, self.needed, self.negative, self.lines = ([torch.zeros(0)] for _ in range(4))

    def collect(self, batch: Batch) -> None:
        weight_BP = self.subject.weight_KP[batch.predicted_B]
        points_BP = batch.clean.score_BP * weight_BP
        self.used.append((points_BP != 0).sum(1).float().cpu())
        self.needed.append(needed_for_most(points_BP).float().cpu())
        self.negative.append(negative_share(points_BP, weight_BP).cpu())
        if batch.perturbed:
            evidence = batch.evidence
            line_points_BE = points_of_lines(evidence, self.subject.class_P[evidence.prototype_BE])
            self.lines.append(needed_for_most(line_points_BE).float().cpu())

    def figures(self) -> list[MetricFigure]:
        weight_KP, note = self.subject.weight_KP, self.subject.sample_note(len(self.subject.samples))
        connections = int((weight_KP != 0).sum())
        return [
            SPARSITY.exact(1 - connections / weight_KP.numel(), f"{connections:,} of {weight_KP.numel():,} are not"),
            USED.mean(torch.cat(self.used), note),
            NEEDED.mean(torch.cat(self.needed), note),
            LINES.mean(torch.cat(self.lines), self.subject.sample_note(self.subject.perturbed)),
            NEGATIVE.mean(torch.cat(self.negative), note),
        ]
