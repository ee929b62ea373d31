"""Are there prototypes too many?

Definitions (ours; mixed after the pruning rule of Chen, Li et al. 2019): a duplicate is the same patch, or the same
vector, as an earlier prototype of its network. An unused prototype has no connection that is not zero. A mixed one
has fewer than half of the ten most similar pictures measured from its own class. Shares of all prototypes.

Limits: two different patches of the same feather are no duplicates. What is mixed may be shared by similar classes
for good reasons; with fewer than ten pictures a class, no prototype can have ten of its own, and the nearest
pictures are as many as the largest class has.
"""

from __future__ import annotations

import torch

from likethat.explaining.latent import latent_space
from likethat.metrics.figure import LOWER, About, MetricFigure
from likethat.metrics.sweep import Batch, Metric, Subject

NEAREST = 10
MIXED = 0.5
GROUP = "prototypes"
DUPLICATES = About("duplicates", LOWER, GROUP, "this project")
UNUSED = About("unused prototypes", LOWER, GROUP, "this project")
MIXED_ONES = About("mixed prototypes", LOWER, GROUP, "after Chen, Li et al. 2019")


class Redundancy(Metric):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        images = subject.label_N.bincount().max() if len(subject.label_N) else 0
        self.nearest = min(NEAREST, int(images))
        self.score_kP = torch.zeros(0, len(subject.class_P), device=subject.class_P.device)
        self.own_kP = torch.zeros(0, len(subject.class_P), device=subject.class_P.device, dtype=torch.bool)

    def collect(self, batch: Batch) -> None:
        """Keep the most similar pictures so far."""
        score_nP = torch.cat([self.score_kP, batch.clean.score_BP])
        own_nP = torch.cat([self.own_kP, batch.label_B[:, None] == self.subject.class_P])
        self.score_kP, best_kP = score_nP.topk(min(self.nearest, len(score_nP)), dim=0)
        self.own_kP = own_nP.gather(0, best_kP)

    def figures(self) -> list[MetricFigure]:
        total = len(self.subject.class_P)
        repeats = sum(first is not None for first in latent_space(self.subject.classifier).first_same_P)
        unused = int((self.subject.weight_KP == 0).all(0).sum())
        mixed_P = self.own_kP.float().mean(0) < MIXED
        return [
            DUPLICATES.exact(repeats / total, f"{repeats} of {total} prototypes"),
            UNUSED.exact(unused / total, f"{unused} of {total} prototypes"),
            MIXED_ONES.proportion(
                mixed_P, f"{int(mixed_P.sum())} of {total} prototypes, {self.nearest} nearest {self.subject.kind} each"
            ),
        ]
