"""A measured figure with its interval, and how intervals are made."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

RESAMPLES = 1000
NORMAL_QUANTILE = 1.959963984540054  # of the normal distribution, for 95 %

HIGHER, LOWER, NEITHER = "higher", "lower", "neither"  # what is better


@dataclass(frozen=True)
class MetricFigure:
    """One line of the tables. `value` is None where the metric has no meaning, and then `note` says why."""

    name: str
    value: float | None
    low: float | None  # the 95 % interval
    high: float | None
    better: str  # HIGHER, LOWER or NEITHER
    unit: str  # "share" of 0 to 1 (printed in percent), "number", or what is counted
    group: str  # a heading of the tables
    source: str
    note: str

    def shown(self) -> tuple[str, str]:
        """Return value and interval as people read them."""
        if self.value is None:
            return "–", ""
        form = "{:.1%}" if self.unit == "share" else "{:.3g}"
        interval = "" if self.low is None else f"{form.format(self.low)} to {form.format(self.high)}"
        return form.format(self.value), interval

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class About:
    """What is the same for every value that a metric takes: all of a `MetricFigure` but the numbers."""

    name: str
    better: str
    group: str
    source: str
    unit: str = "share"

    def proportion(self, true_n: Tensor, note: str) -> MetricFigure:
        """Return the share of true ones, with Wilson's interval."""
        count = len(true_n)
        if not count:
            return self.absent("nothing to measure it on")
        value = float(true_n.cpu().double().mean())
        return self.measured(value, wilson_interval(value, count), note)

    def mean(self, value_n: Tensor, note: str) -> MetricFigure:
        """Return the mean, with the bootstrap's interval over the n values. Those that are not numbers are left out."""
        values = value_n.cpu().double().numpy()
        values = values[np.isfinite(values)]
        if not len(values):
            return self.absent("nothing to measure it on")
        return self.measured(float(values.mean()), bootstrap_interval(values), note)

    def exact(self, value: float, note: str) -> MetricFigure:
        """Return a figure of the model itself, which no choice of images changes."""
        return self.measured(value, (None, None), note)

    def absent(self, why: str) -> MetricFigure:
        return self.measured(None, (None, None), why)

    def measured(self, value: float | None, interval: tuple[float | None, float | None], note: str) -> MetricFigure:
        """Return a figure whose interval is known."""
        return MetricFigure(self.name, value, *interval, self.better, self.unit, self.group, self.source, note)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share seen in so many draws. scipy.stats has the same, and takes a second to
    import."""
    found = round(share * count)
    p, squared = found / count, NORMAL_QUANTILE**2
    middle = (2 * count * p + squared) / (2 * (count + squared))
    half = NORMAL_QUANTILE / (2 * (count + squared)) * math.sqrt(4 * count * p * (1 - p) + squared)
    low, high = middle - half if found else 0.0, middle + half if found < count else 1.0
    return min(share, low), max(share, high)  # rounding must not leave the share outside


def resamples_of(count: int) -> list[int]:
    """Split RESAMPLES into parts: so many at a time that draws of `count` values each are small beside the images."""
    part = max(1, 4_000_000 // count)
    return [min(part, RESAMPLES - start) for start in range(0, RESAMPLES, part)]


def bootstrap_interval(values_n: np.ndarray) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean; the same draws every time."""
    generator = np.random.default_rng(0)
    count = len(values_n)
    means = [values_n[generator.integers(count, size=(rows, count))].mean(1) for rows in resamples_of(count)]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)
