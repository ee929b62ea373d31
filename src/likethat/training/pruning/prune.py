"""Pruning: which prototypes look like parts of their own class, and how many connections the last layer needs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from likethat.config.settings import TrainConfig
from likethat.errors import UserError
from likethat.inference.memory_map import make_file, map_file
from likethat.inference.score_cache import BLOCK, WHAT
from likethat.inference.source_image import leave_source_out
from likethat.models.protopnet import logits_of_scores
from likethat.training.last_layer import LastLayerSolution, solve_last_layer, terms_of
from likethat.training.last_layer_problem import data_gradient_of, make_problem

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
    images: int  # of which there may be several views: view v of image i is row v * images + i
    scratch: Path | None = None  # where files may be made; scores that are in one are float16
    weight_N: Tensor | None = None  # how much each row counts, 1 on average; None where all count alike

    def select(self, keep_p: Tensor) -> CachedScores:
        """Return the scores of these prototypes only."""
        source_p = None if self.source_P is None else self.source_P[keep_p]
        score_Np = self._changed_scores(len(keep_p), lambda _, score_bP: score_bP[:, keep_p])
        return replace(self, score_NP=score_Np, class_P=self.class_P[keep_p], source_P=source_p)

    def columns(self, chosen_p: Tensor) -> Tensor:
        """Return the scores of a few prototypes, N x p, ready for arithmetic."""
        score_Np = self.score_NP[:, chosen_p.to(self.score_NP.device)]
        return score_Np.to(self.label_N.device, torch.promote_types(score_Np.dtype, torch.float32))

    def fair(self) -> CachedScores:
        """Return the scores that the last layer learns from, as in training."""
        if self.source_P is None:
            return self
        source_P, own_KP = self.source_P, torch.arange(self.num_classes).to(self.class_P)[:, None] == self.class_P
        score_NP = self._changed_scores(
            len(source_P),
            lambda row_b, score_bP: leave_source_out(score_bP, row_b[:, None] % self.images, source_P, own_KP),
        )
        return replace(self, score_NP=score_NP, source_P=None)

    def logits(self, weight_Kp: Tensor, keep_p: Tensor | None = None) -> Tensor:
        """Return the logits, N x K, of these prototypes or all."""
        blocks = [
            logits_of_scores(score_bP if keep_p is None else score_bP[:, keep_p], weight_Kp)
            for _, score_bP in self.blocks()
        ]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some images and their scores after others, ready for arithmetic; all at once where there are few."""
        device, rows = self.label_N.device, max(1, BLOCK // self.score_NP.shape[1])
        image_N = torch.arange(len(self.score_NP), device=device)
        for image_b, score_bP in zip(image_N.split(rows), self.score_NP.split(rows), strict=True):
            yield image_b, score_bP.to(device, torch.promote_types(score_bP.dtype, torch.float32))

    def _changed_scores(self, prototypes: int, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the scores with `change` applied, in memory or in a file as these are."""
        count = len(self.score_NP)
        if self.score_NP.dtype == torch.float16:
            file = Path(tempfile.mkdtemp(dir=self.scratch)) / "scores.f16"
            make_file(file, (count, prototypes), WHAT)
            made_Np = map_file(file, (count, prototypes))
        else:
            made_Np = self.score_NP.new_empty(count, prototypes)
        for image_b, score_bP in self.blocks():
            made_Np[int(image_b[0]) : int(image_b[-1]) + 1] = change(image_b, score_bP).to(made_Np)
        return made_Np


def own_neighbours(image_Pk: Tensor, label_N: Tensor, class_P: Tensor) -> Tensor:
    """Count the nearest images of each prototype that are of its own class."""
    return (label_N[image_Pk] == class_P[:, None]).sum(1)


def prototypes_to_keep(
    own_P: Tensor, class_P: Tensor, classes: Sequence[str], *, threshold: int, keep_one: bool
) -> Tensor:
    """Return the numbers of the prototypes with at least `threshold` neighbours of their own class.

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
    return _with_one_of_each(kept_P, class_P, own_P)


def connected_prototypes(weight_KP: Tensor, class_P: Tensor) -> Tensor:
    """Return the numbers of the prototypes that have a connection, which may be to no class at all where those to their
    own must not be negative; of a class without any, the first."""
    connections_P = (weight_KP != 0).sum(0)
    return _with_one_of_each(connections_P > 0, class_P, connections_P)


def _with_one_of_each(kept_P: Tensor, class_P: Tensor, value_P: Tensor) -> Tensor:
    """Return the numbers of the prototypes to keep; of a class without any, that of the first with the most value."""
    kept_P = kept_P.clone()
    for label in class_P.unique().tolist():
        member_m = (class_P == label).nonzero()[:, 0]
        if not bool(kept_P[member_m].any()):
            kept_P[member_m[value_P[member_m].argmax()]] = True
    return kept_P.nonzero()[:, 0]


def refit_last_layer(scores: CachedScores, start_KP: Tensor | None, settings: TrainConfig) -> LastLayerSolution:
    """Solve the last layer with the run's own lambda and ridge; without a start, the result is the same whatever
    weights there were before."""
    return solve_last_layer(
        scores.fair().score_NP,
        scores.label_N,
        scores.class_P,
        scores.num_classes,
        lam=settings.l1,
        **terms_of(settings),
        weight_N=scores.weight_N,
        start_KP=start_KP,
    )


def path_lambdas(largest: float) -> list[float]:
    """Return lambdas from the one that leaves no connection to other classes downwards, in equal logarithmic steps."""
    return [largest * PATH_SPAN ** (number / (PATH_POINTS - 1)) for number in range(PATH_POINTS)]


def largest_lambda(scores: CachedScores, settings: TrainConfig) -> float:
    """Return the least lambda at which every connection to another class is zero.

    Zero is optimal for a connection while the gradient there is no larger than lambda; so: the largest gradient
    once the own-class connections are optimal by themselves.
    """
    data = (scores.fair().score_NP, scores.label_N, scores.class_P, scores.num_classes)
    problem = make_problem(*data, lam=0.0, ridge=settings.ridge, weight_N=scores.weight_N)
    alone = refit_last_layer(scores, None, replace(settings, l1=lambda_for_any(scores)))
    gradient_KP = data_gradient_of(problem, problem.at(alone.weight_KP))
    return float((gradient_KP * ~problem.own_KP).abs().max()) + MARGIN


def lambda_for_any(scores: CachedScores) -> float:
    """Return a lambda at which every connection to another class is zero, whichever of the prototypes there are: no
    gradient exceeds the largest score."""
    return 1 + max(float(score_bP.abs().max()) for _, score_bP in scores.blocks())


@dataclass(frozen=True)
class PathPoint:
    """What a lambda gives."""

    lam: float
    connections: int  # that are not zero, over all members
    accuracy: float  # on validation


def choose_point(path: Sequence[PathPoint], budget: int) -> int:
    """Return the most accurate point with at most `budget` connections; of several, the one with fewest."""
    allowed = [number for number, point in enumerate(path) if point.connections <= budget]
    if not allowed:
        least = min(point.connections for point in path)
        raise UserError(f"No model of this run has {budget} connections or fewer; the sparsest has {least}.")
    return max(allowed, key=lambda number: (path[number].accuracy, -path[number].connections))
