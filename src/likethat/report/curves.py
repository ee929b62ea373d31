"""Charts of a training run: every number of the epochs as a line, the stages behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

WIDTH, HEIGHT = 320, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 22, 24  # margins around the field
FIRST = ("accuracy", "loss", "cross_entropy", "cluster", "separation")  # in this order; others follow
TITLES = {"cross_entropy": "Cross entropy", "cluster": "Cluster cost", "separation": "Separation cost"}


@dataclass(frozen=True)
class Line:
    name: str  # train or val
    points: str  # of an SVG polyline
    last: str


@dataclass(frozen=True)
class Mark:
    """A stage (from x to x + width) or, of width 0, a projection."""

    name: str
    x: float
    width: float


@dataclass(frozen=True)
class Chart:
    title: str
    lines: tuple[Line, ...]
    stages: tuple[Mark, ...]
    projections: tuple[Mark, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]


def charts(metrics: Sequence[dict[str, Any]]) -> list[Chart]:
    """One chart a quantity. Epochs are counted through the whole run."""
    epochs = [entry for entry in metrics if isinstance(entry.get("train"), dict)]
    if not epochs:
        return []
    names = list(dict.fromkeys(name for entry in epochs for part in ("train", "val") for name in entry.get(part) or {}))
    names.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    drawn = [_chart(name, epochs, metrics) for name in names]
    return [chart for chart in drawn if chart.lines]


def _chart(name: str, epochs: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]]) -> Chart:
    values = {part: [_number(entry, part, name) for entry in epochs] for part in ("train", "val")}
    known = [value for line in values.values() for value in line if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    ticks = [tick / 100 for tick in range(0, 101, 20)] if name == "accuracy" else nice_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    percent = name == "accuracy"

    def y(value: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low), 1)

    def text(value: float) -> str:
        return f"{value:.1%}" if percent else f"{value:.3g}"

    lines = []
    for part, numbers in values.items():
        points = [(_x(i + 0.5, len(epochs)), number) for i, number in enumerate(numbers) if number is not None]
        if points:
            drawn = " ".join(f"{x},{y(number)}" for x, number in points)
            lines.append(Line(part, drawn, text(points[-1][1])))
    return Chart(
        title=TITLES.get(name, name.replace("_", " ").capitalize()),
        lines=tuple(lines),
        stages=_stages(epochs),
        projections=_projections(metrics, len(epochs)),
        x_ticks=tuple((_x(n - 0.5, len(epochs)), str(n)) for n in _epoch_ticks(len(epochs))),
        y_ticks=tuple((y(tick), f"{tick:.0%}" if percent else f"{tick:g}") for tick in ticks),
    )


def _number(entry: dict[str, Any], part: str, name: str) -> float | None:
    """None where there is none, or one that cannot be drawn."""
    value = (entry.get(part) or {}).get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _x(epoch: float, epochs: int) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * epoch / epochs, 1)


def _stages(epochs: Sequence[dict[str, Any]]) -> tuple[Mark, ...]:
    marks, done = [], 0
    for stage, group in groupby(str(entry["stage"]) for entry in epochs):
        count = len(list(group))
        start, end = _x(done, len(epochs)), _x(done + count, len(epochs))
        marks.append(Mark(stage.replace("_", " "), start, end - start))
        done += count
    return tuple(marks)


def _projections(metrics: Sequence[dict[str, Any]], epochs: int) -> tuple[Mark, ...]:
    marks, done = [], 0
    for entry in metrics:
        done += isinstance(entry.get("train"), dict)
        if entry.get("stage") == "project":
            marks.append(Mark("projection", _x(done, epochs), 0))
    return tuple(marks)


def _epoch_ticks(epochs: int) -> list[int]:
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, epochs) if epochs / step <= 6)
    return [1, *range(step, epochs + 1, step)] if step > 1 else list(range(1, epochs + 1))


def nice_ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that span the values."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= 4)
    first, last = math.floor(low / step), math.ceil(high / step)
    last = max(last, first + 1)
    return [round(number * step, 12) for number in range(first, last + 1)]
