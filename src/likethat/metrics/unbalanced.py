"""How good a model is for every class, however many pictures each has: figures that a large class cannot drown.

Of each class k against all others, by the probability of k:

- sensitivity (recall): share of the pictures of k that are taken for k; specificity: share of the others that are not.
- precision: share of the pictures taken for k that are of k; F1: harmonic mean of precision and sensitivity.
- AUROC: chance that a picture of k gets a larger probability of k than one of another class, ties counting half.
  Interval: DeLong's variance (1988) on the logit scale; where all are in order, what k pictures can tell.
- AUPRC: average precision, the sum of precisions at each gain of recall. Interval: logit interval (Boyd et al. 2013).

Balanced accuracy is the mean sensitivity over the classes that have pictures, macro F1 their mean F1. Intervals of
shares are Wilson's; that of balanced accuracy is put together of them (Zou and Donner 2008), so that a class whose few
pictures are all right or all wrong is not taken for certain; that of macro F1 is a bootstrap of the pictures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from likethat.data.reading.workers import map_in_threads
from likethat.metrics.figure import NORMAL_QUANTILE, RESAMPLES, wilson_interval

Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"


@dataclass(frozen=True)
class ClassFigures:
    """What is known of one class against all others; None where there is nothing to measure it on."""

    name: str
    images: int
    sensitivity: Estimate | None
    specificity: Estimate | None
    precision: Estimate | None
    f1: float | None
    auroc: Estimate | None
    auprc: Estimate | None


@dataclass(frozen=True)
class BalancedFigures:
    balanced_accuracy: Estimate
    macro_f1: Estimate
    macro_auroc: float | None
    macro_auprc: float | None
    classes: tuple[ClassFigures, ...]

    @property
    def positive(self) -> ClassFigures | None:
        """Return the class that sensitivity and specificity are told of, where there are two: the one with fewer
        pictures."""
        return min(self.classes, key=lambda one: one.images) if len(self.classes) == 2 else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def balanced_figures(logits_NK: Tensor, label_N: Tensor, classes: Sequence[str]) -> BalancedFigures:
    """Return all figures; there is at least one picture."""
    log_NK = logits_NK.cpu().double().log_softmax(1).numpy()
    label, guess = label_N.cpu().numpy(), log_NK.argmax(1)
    count_KK = np.zeros((len(classes), len(classes)), np.int64)  # true class, predicted class
    np.add.at(count_KK, (label, guess), 1)

    def figures_of(k: int) -> ClassFigures:
        return _class_figures(classes[k], k, log_NK[:, k], label == k, count_KK)

    found = tuple(map_in_threads(figures_of, range(len(classes))))  # which sort all pictures, each
    return BalancedFigures(
        _balanced_accuracy(count_KK),
        _macro_f1(count_KK),
        _mean([one.auroc.value for one in found if one.auroc]),
        _mean([one.auprc.value for one in found if one.auprc]),
        found,
    )


def _class_figures(name: str, k: int, score_N: np.ndarray, own_N: np.ndarray, count_KK: np.ndarray) -> ClassFigures:
    images, taken, right = int(count_KK[k].sum()), int(count_KK[:, k].sum()), int(count_KK[k, k])
    others = len(own_N) - images
    both = images > 0 and others > 0
    return ClassFigures(
        name,
        images,
        _share(right, images),
        _share(others - (taken - right), others),
        _share(right, taken),
        2 * right / (images + taken) if images else None,
        auroc(score_N, own_N) if both else None,
        auprc(score_N, own_N) if both else None,
    )


def _share(part: int, whole: int) -> Estimate | None:
    """Return a share with Wilson's interval."""
    if not whole:
        return None
    return Estimate(part / whole, *wilson_interval(part / whole, whole))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def mid_ranks(value_N: np.ndarray) -> np.ndarray:
    """Return the rank of each value, from 1 on; equal ones share the middle of theirs. scipy.stats has the same, and
    takes a second to import."""
    _, which_N, count_n = np.unique(value_N, return_inverse=True, return_counts=True)
    return (count_n.cumsum() - (count_n - 1) / 2)[which_N]


def auroc(score_N: np.ndarray, own_N: np.ndarray) -> Estimate:
    own, other = score_N[own_N], score_N[~own_N]
    rank_N = mid_ranks(np.concatenate([own, other]))
    # Shares of the others that lie below each picture of the class, and of the class's that lie above each other one.
    above_own = (rank_N[: len(own)] - mid_ranks(own)) / len(other)
    above_other = 1 - (rank_N[len(own) :] - mid_ranks(other)) / len(own)
    value = float(above_own.mean())
    spread = sum(float(part.var(ddof=1)) / len(part) for part in (above_own, above_other) if len(part) > 1)
    if spread == 0:
        least = 0.025 ** (1 / min(len(own), len(other)))
        return Estimate(value, least * value, 1 - (1 - value) * least)
    return Estimate(value, *_logit_interval(value, math.sqrt(spread) / (value * (1 - value)) if 0 < value < 1 else 0))


def auprc(score_N: np.ndarray, own_N: np.ndarray) -> Estimate:
    order = np.argsort(-score_N, kind="stable")
    score, own = score_N[order], own_N[order]
    last = np.append(np.flatnonzero(np.diff(score)), len(score) - 1)  # of each run of equal scores
    right = np.cumsum(own)[last]
    precision, gained = right / (last + 1), np.diff(right, prepend=0) / own.sum()
    value = float((precision * gained).sum())
    if value >= 1:
        return Estimate(value, float(0.025 ** (1 / own.sum())), 1.0)
    return Estimate(value, *_logit_interval(value, 1 / math.sqrt(own.sum() * value * (1 - value))))


def _logit_interval(value: float, spread: float) -> Interval:
    """Return the interval of a share whose logit has this standard deviation."""
    if not 0 < value < 1:
        return value, value
    middle = math.log(value / (1 - value))
    low, high = (math.tanh((middle + side * NORMAL_QUANTILE * spread) / 2) for side in (-1, 1))
    return (1 + low) / 2, (1 + high) / 2


def _balanced_accuracy(count_KK: np.ndarray) -> Estimate:
    shares = [_share(int(count_K[k]), int(count_K.sum())) for k, count_K in enumerate(count_KK)]
    known = [share for share in shares if share is not None]
    value = sum(share.value for share in known) / len(known)
    below, above = (
        math.hypot(*distances) / len(known)
        for distances in zip(*((share.value - share.low, share.high - share.value) for share in known), strict=True)
    )
    return Estimate(value, value - below, value + above)


def _macro_f1(count_KK: np.ndarray) -> Estimate:
    true_c, guess_c = np.nonzero(count_KK)  # cells that are not empty
    count_c, classes = count_KK[true_c, guess_c], len(count_KK)
    known_K = count_KK.sum(1) > 0

    def macro(count_c: np.ndarray) -> float:
        image_K, taken_K = (np.bincount(cells, count_c, classes) for cells in (true_c, guess_c))
        right_K = np.bincount(true_c, count_c * (true_c == guess_c), classes)
        return float((2 * right_K / np.maximum(image_K + taken_K, 1))[known_K].mean())

    generator, total = np.random.default_rng(0), int(count_c.sum())
    draws = [macro(drawn_c) for drawn_c in generator.multinomial(total, count_c / total, RESAMPLES)]
    value, (low, high) = macro(count_c), np.percentile(draws, [2.5, 97.5])
    return Estimate(value, min(value, float(low)), max(value, float(high)))
