"""Pruning: which prototypes look like parts of their own class, and how many connections the last layer needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from likethat.config import TrainConfig
from likethat.errors import UserError
from likethat.training.last_layer import LastLayerSolution, solve_last_layer
from likethat.training.losses import leave_source_out

NEAREST, THRESHOLD = 6, 3  # the paper's k and tau
MARGIN = 3e-5  # above the largest gradient; the solver leaves errors of 1e-5
PATH_POINTS, PATH_SPAN = 32, 1e-3  # lambdas of a path, and the smallest of them as a share of the largest


@dataclass(frozen=True)
class CachedScores:
    """All that the last layer is fitted to: scores of images whose network no longer moves."""

    score_NP: Tensor
    label_N: Tensor
    class_P: Tensor
    num_classes: int
    source_P: Tensor | None  # the image each prototype was cut from, where it must not judge that image

    def select(self, keep_p: Tensor) -> CachedScores:
        """With these prototypes only."""
        source_p = None if self.source_P is None else self.source_P[keep_p]
        return CachedScores(self.score_NP[:, keep_p], self.label_N, self.class_P[keep_p], self.num_classes, source_p)

    def fair_scores(self) -> Tensor:
        """What the last layer learns from, as in training."""
        if self.source_P is None:
            return self.score_NP
        own_KP = torch.arange(self.num_classes, device=self.class_P.device)[:, None] == self.class_P
        image_N1 = torch.arange(len(self.score_NP), device=self.score_NP.device)[:, None]
        return leave_source_out(self.score_NP, image_N1, self.source_P, own_KP)


def own_neighbours(image_Pk: Tensor, label_N: Tensor, class_P: Tensor) -> Tensor:
    """How many of the nearest images of each prototype are of its own class."""
    return (label_N[image_Pk] == class_P[:, None]).sum(1)


def prototypes_to_keep(
    own_P: Tensor, class_P: Tensor, classes: Sequence[str], *, threshold: int, keep_one: bool
) -> Tensor:
    """The numbers of the prototypes with at least `threshold` neighbours of their own class.

    A class must not lose its last one: with `keep_one` the one with most such neighbours (the first of several)
    stays, without it that is the user's to decide.
    """
    kept_P = own_P >= threshold
    empty = [label for label in range(len(classes)) if not bool(kept_P[class_P == label].any())]
    if empty and not keep_one:
        names = ", ".join(classes[label] for label in empty[:5]) + (" and others" if len(empty) > 5 else "")
        raise UserError(
            f"Pruning would leave {names} without any prototype; pass --keep-one to keep the best one of each class, "
            "or a lower --threshold."
        )
    for label in empty:
        member_m = (class_P == label).nonzero()[:, 0]
        kept_P[member_m[own_P[member_m].argmax()]] = True
    return kept_P.nonzero()[:, 0]


def refit_last_layer(scores: CachedScores, start_KP: Tensor | None, settings: TrainConfig) -> LastLayerSolution:
    """With the run's own lambda and ridge; without a start, the same from whatever weights there were before."""
    return solve_last_layer(
        scores.fair_scores(),
        scores.label_N,
        scores.class_P,
        scores.num_classes,
        lam=settings.l1,
        ridge=settings.ridge,
        start_KP=start_KP,
    )


def path_lambdas(largest: float) -> list[float]:
    """From the lambda that leaves no connection to other classes downwards, in equal steps of its logarithm."""
    return [largest * PATH_SPAN ** (number / (PATH_POINTS - 1)) for number in range(PATH_POINTS)]


def largest_lambda(scores: CachedScores, settings: TrainConfig) -> float:
    """The least lambda at which every connection to another class is zero.

    Zero is optimal for a connection while the gradient there is no larger than lambda; so: the largest gradient
    once the own-class connections are optimal by themselves. No gradient exceeds the largest score.
    """
    score_NP = scores.fair_scores()
    data = (score_NP, scores.label_N, scores.class_P, scores.num_classes)
    alone = solve_last_layer(*data, lam=1 + float(score_NP.abs().max()), ridge=settings.ridge)
    error_NK = (score_NP.to(alone.weight_KP) @ alone.weight_KP.T).softmax(1)
    error_NK[torch.arange(len(error_NK)), scores.label_N] -= 1
    gradient_KP = error_NK.T @ score_NP.to(error_NK) / len(error_NK)
    other_KP = scores.class_P != torch.arange(scores.num_classes, device=scores.class_P.device)[:, None]
    return float((gradient_KP * other_KP).abs().max()) + MARGIN


@dataclass(frozen=True)
class PathPoint:
    """What a lambda gives."""

    lam: float
    connections: int  # that are not zero, over all members
    accuracy: float  # on validation


def choose_point(path: Sequence[PathPoint], budget: int) -> int:
    """The most accurate point with at most `budget` connections; of several, the one with fewest."""
    allowed = [number for number, point in enumerate(path) if point.connections <= budget]
    if not allowed:
        least = min(point.connections for point in path)
        raise UserError(
            f"No model of this run has {budget} connections or fewer; the sparsest has {least}. Raise --budget, or "
            "remove prototypes first with `likethat prune` without --budget."
        )
    return max(allowed, key=lambda number: (path[number].accuracy, -path[number].connections))
