"""How much does a person have to look at to follow a prediction?

Definitions: sparsity is the share of all connections that are zero (Nauta et al. 2023). A prediction uses the
prototypes whose points for the predicted class are not zero; to follow it, those that give nine tenths of all points
(their absolute values, largest first) must be looked at. Points from negative connections: their share of all points
of the predicted class, in absolute values ('this does not look like that').

Limits: counts prototypes, not looks; duplicates count as often as they are there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from likethat.metrics.figure import HIGHER, LOWER, About, MetricFigure
from likethat.metrics.sweep import Batch, Metric, Subject

MOST = 0.9
GROUP = "prototypes"
SPARSITY = About("connections that are zero", HIGHER, GROUP, "Nauta et al. 2023")
USED = About("prototypes a prediction uses", LOWER, GROUP, "Nauta et al. 2023", unit="prototypes")
NEEDED = About("prototypes for nine tenths of the points", LOWER, GROUP, "this project", unit="prototypes")
NEGATIVE = About("points from negative connections", LOWER, GROUP, "this project")


def needed_for_most(points_BP: Tensor) -> Tensor:
    """Return the least number of prototypes that have MOST of all points, in absolute values."""
    sorted_BP = points_BP.abs().sort(dim=1, descending=True).values
    return (sorted_BP.cumsum(1) < MOST * sorted_BP.sum(1, keepdim=True)).sum(1) + 1


def negative_share(points_BP: Tensor, weight_BP: Tensor) -> Tensor:
    size_BP = points_BP.abs()
    return (size_BP * (weight_BP < 0)).sum(1) / size_BP.sum(1)


class Sparsity(Metric):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.used, self.needed, self.negative = ([torch.zeros(0)] for _ in range(3))

    def collect(self, batch: Batch) -> None:
        weight_BP = self.subject.weight_KP[batch.predicted_B]
        points_BP = batch.clean.score_BP * weight_BP
        self.used.append((points_BP != 0).sum(1).float().cpu())
        self.needed.append(needed_for_most(points_BP).float().cpu())
        self.negative.append(negative_share(points_BP, weight_BP).cpu())

    def figures(self) -> list[MetricFigure]:
        weight_KP, note = self.subject.weight_KP, self.subject.sample_note(len(self.subject.samples))
        connections = int((weight_KP != 0).sum())
        return [
            SPARSITY.exact(1 - connections / weight_KP.numel(), f"{connections:,} of {weight_KP.numel():,} are not"),
            USED.mean(torch.cat(self.used), note),
            NEEDED.mean(torch.cat(self.needed), note),
            NEGATIVE.mean(torch.cat(self.negative), note),
        ]
