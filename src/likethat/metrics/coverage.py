"""How many of the annotated parts does a class look at?

Definition (ours): a part is covered if some prototype that the class uses (its connection to the class is not zero)
lands on it (see `consistency`) in at least half of the class's test pictures that show it. Coverage of a class is the
share of its visible parts that are covered; the score is the mean over the classes.

Limits: a class may need few parts to be known by, so more is not always better; it tells consistent models that look
at many parts from consistent models that look at one. The squares are large and hold several parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from likethat.metrics.figure import HIGHER, About, MetricFigure
from likethat.metrics.part_hits import NO_PARTS, PartHits

LEAST = 0.5
ABOUT = About("part coverage", HIGHER, "parts", "this project")


def coverages(hit_PQ: Tensor, visible_PQ: Tensor, class_P: Tensor, used_P: Tensor, classes: int) -> Tensor:
    """Return the coverage of every class; NaN for a class that no part was seen of."""
    share_PQ = hit_PQ.double() / visible_PQ.clamp(min=1) * used_P[:, None]
    nothing_KQ, class_PQ = share_PQ.new_zeros(classes, share_PQ.shape[1]), class_P[:, None].expand_as(share_PQ)
    best_KQ = nothing_KQ.scatter_reduce(0, class_PQ, share_PQ, "amax")
    seen_KQ = nothing_KQ.scatter_reduce(0, class_PQ, visible_PQ.double(), "amax") > 0
    return (seen_KQ & (best_KQ >= LEAST)).sum(1) / seen_KQ.sum(1).double()


class Coverage(PartHits):
    def figures(self) -> list[MetricFigure]:
        if self.subject.parts is None:
            return [ABOUT.absent(NO_PARTS)]
        class_P = self.subject.class_P.cpu()
        used_P = self.subject.weight_KP.cpu().T[torch.arange(len(class_P)), class_P] != 0
        classes = len(self.subject.classifier.classes)
        coverage_K = coverages(self.hit_PQ, self.visible_PQ, class_P, used_P, classes)
        return [ABOUT.mean(coverage_K, f"{classes} classes, {len(self.subject.parts.names)} parts")]
