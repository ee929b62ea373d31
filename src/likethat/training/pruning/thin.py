"""Fewer prototypes, chosen on validation images: those leave that are missed least.

What would be missed of a prototype is the part of its score that the other prototypes of its class do not tell: of two
that fire together one is free to go, for the last layer gives its points to the other. That part is the remainder of a
linear regression of its score on theirs, over the training images. The cost of a removal is the mean cross entropy of
the validation images once the points of that remainder are gone. Prototypes leave in rounds, at most one of a class in
each, and the last layer is solved again after every round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from likethat.config.settings import TrainConfig
from likethat.errors import UserError
from likethat.runtime import wide
from likethat.training.last_layer import LastLayerSolution
from likethat.training.pruning.prune import CachedScores, refit_last_layer

AT_ONCE = 0.1  # of the prototypes that leave in a round, at most
RIDGE = 1e-6  # of the regression, as a share of the mean square of the scores: two may be the same


@dataclass(frozen=True)
class Thinned:
    """A model with some of the prototypes."""

    keep_p: Tensor
    solution: LastLayerSolution


def untold(score_Nm: Tensor) -> Tensor:
    """Return m x m: scores times this give what each prototype's score has beyond what the others tell of it.

    The remainders of all m regressions come from one inverse: column p of (S'S)^-1 over its diagonal entry.
    """
    gram_mm = wide(score_Nm).T @ wide(score_Nm)
    gram_mm = gram_mm + RIDGE * gram_mm.diagonal().mean() * torch.eye(len(gram_mm)).to(gram_mm)
    inverse_mm = torch.linalg.inv(gram_mm)
    return inverse_mm / inverse_mm.diagonal()


def removal_costs(train: CachedScores, val: CachedScores, weight_KP: Tensor) -> Tensor:
    """Return for every prototype the validation images' mean cross entropy without it. `train` is fair."""
    logits_NK, weight_KP = wide(val.logits(weight_KP)), wide(weight_KP)
    label_N, cost_P = val.label_N.to(logits_NK.device), torch.zeros(len(val.class_P), dtype=torch.double)
    for label in range(val.num_classes):
        own_m = (val.class_P == label).nonzero()[:, 0]
        beyond_Nm = wide(val.columns(own_m)) @ untold(train.columns(own_m))
        for p, beyond_N in zip(own_m.tolist(), beyond_Nm.T, strict=True):
            without_NK = logits_NK - beyond_N[:, None] * weight_KP[:, p]
            cost_P[p] = F.cross_entropy(without_NK, label_N)
    return cost_P


def leaving(cost_P: Tensor, class_P: Tensor, least: int, most: int) -> list[int]:
    """Return those that cost least: at most so many, one of a class, and none of a class with `least` prototypes."""
    chosen: dict[int, int] = {}
    counts = class_P.bincount().tolist()
    for p in cost_P.argsort(stable=True).tolist():
        label = int(class_P[p])
        if len(chosen) < most and counts[label] > least:
            chosen.setdefault(label, p)
    return sorted(chosen.values())


def thin(
    train: CachedScores, val: CachedScores, settings: TrainConfig, *, least: int = 1, target: int = 0
) -> Iterator[Thinned]:
    """Yield models with fewer and fewer prototypes, beginning with all: until `target` are left, or `least` of each
    class. `settings` has the lambda and the ridge of the last layer."""
    keep_p = torch.arange(len(train.class_P), device=train.class_P.device)
    solution = refit_last_layer(train, None, settings)
    yield Thinned(keep_p, solution)
    while len(keep_p) > target:
        cost_p = removal_costs(train.fair(), val, solution.weight_KP)
        gone = leaving(cost_p, train.class_P, least, min(math.ceil(AT_ONCE * len(keep_p)), len(keep_p) - target))
        if not gone:
            return
        stay_p = torch.tensor([p for p in range(len(keep_p)) if p not in gone], device=keep_p.device)
        keep_p, train, val = keep_p[stay_p], train.select(stay_p), val.select(stay_p)
        solution = refit_last_layer(train, solution.weight_KP[:, stay_p], settings)
        yield Thinned(keep_p, solution)


def fewest_within_error(accuracies: Sequence[float], images: int) -> int:
    """Return the last of these models whose accuracy is within one standard error of the first one's."""
    best = accuracies[0]
    floor = best - math.sqrt(best * (1 - best) / images)
    return max(number for number, accuracy in enumerate(accuracies) if accuracy >= floor)


def share_budget(budget: int, counts: Sequence[int], num_classes: int) -> list[int]:
    """Return how many prototypes each network of a run may keep: one a class, and the rest in proportion to what it has
    beyond that."""
    fewest = num_classes * len(counts)
    if budget < fewest:
        networks = f" in each of the {len(counts)} networks" if len(counts) > 1 else ""
        raise UserError(f"Every class needs a prototype{networks}, so --budget must be {fewest} or more, not {budget}.")
    beyond = sum(counts) - fewest
    return [num_classes + (budget - fewest) * (count - num_classes) // max(1, beyond) for count in counts]
