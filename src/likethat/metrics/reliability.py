"""Is the model as often right as it says it is?

Definition (Guo et al. 2017, "On calibration of modern neural networks", ICML): images are sorted into 15 bins of equal
width by the probability of their predicted class. The expected calibration error is the difference between that
probability and the share of right predictions, each averaged over a bin, averaged over bins by their images.

Limits: on few images it is too high, even for a model that is perfectly calibrated; the note says how high for such a
one. Only the predicted class's probability is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from likethat.metrics.figure import LOWER, About, MetricFigure, resamples_of

BINS = 15
ABOUT = About("expected calibration error", LOWER, "trust", "Guo et al. 2017")


@dataclass(frozen=True)
class Bin:
    """Images whose predicted class has a probability above `low` and at most `high`."""

    low: float
    high: float
    images: int
    confidence: float  # mean probability of the predicted class
    accuracy: float


def reliability(logits_NK: Tensor, label_N: Tensor) -> list[Bin]:
    """Return the bins that hold images, from doubt to certainty."""
    confidence_N, right_N = _confidence(logits_NK, label_N)
    bin_N = _bins(confidence_N)
    return [
        Bin(
            number / BINS,
            (number + 1) / BINS,
            int((bin_N == number).sum()),
            float(confidence_N[bin_N == number].mean()),
            float(right_N[bin_N == number].mean()),
        )
        for number in np.unique(bin_N).tolist()
    ]


def calibration_figures(logits_NK: Tensor, label_N: Tensor) -> list[MetricFigure]:
    if not len(label_N):
        return [ABOUT.absent("nothing to measure it on")]
    confidence_N, right_N = _confidence(logits_NK, label_N)
    count, generator = len(label_N), np.random.default_rng(0)
    value = float(_errors(confidence_N[None], right_N[None])[0])
    drawn = (generator.integers(count, size=(rows, count)) for rows in resamples_of(count))
    low, high = np.percentile(
        np.concatenate([_errors(confidence_N[drawn_RN], right_N[drawn_RN]) for drawn_RN in drawn]), [2.5, 97.5]
    )
    # Small bins err by chance, and errors do not cancel: resampling shifts upwards, so the value may lie below.
    interval = min(float(low), value), max(float(high), value)
    right = ((generator.random((rows, count)) < confidence_N).astype(float) for rows in resamples_of(count))
    perfect = np.concatenate(
        [_errors(np.broadcast_to(confidence_N, right_RN.shape), right_RN) for right_RN in right]
    ).mean()
    note = f"{count} images, on which a perfectly calibrated model would have {perfect:.1%}"
    return [ABOUT.measured(value, interval, note)]


def _confidence(logits_NK: Tensor, label_N: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability of the predicted class, and 1 where it is right."""
    confidence_N, guess_N = logits_NK.cpu().double().softmax(1).max(1)
    return confidence_N.numpy(), (guess_N == label_N.cpu()).double().numpy()


def _bins(confidence: np.ndarray) -> np.ndarray:
    return np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)


def _errors(confidence_RN: np.ndarray, right_RN: np.ndarray) -> np.ndarray:
    """Return the expected calibration error of each row."""
    rows, count = confidence_RN.shape
    cell_RN = _bins(confidence_RN) + BINS * np.arange(rows)[:, None]
    gap_RN = (right_RN - confidence_RN).ravel()
    total = np.bincount(cell_RN.ravel(), weights=gap_RN, minlength=rows * BINS).reshape(rows, BINS)
    return np.asarray(np.abs(total).sum(1) / count)
