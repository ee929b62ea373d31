"""Charts of a training run: every number of the epochs as a line, the stages behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from likethat.report import charts
from likethat.report.charts import ACCENT, SOFT, Axis, draw_text

WIDTH, HEIGHT = 320, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 22, 24  # margins around the field
FIRST = ("accuracy", "loss", "cross_entropy", "cluster", "separation")  # in this order; others follow
TITLES = {"cross_entropy": "Cross entropy", "cluster": "Cluster cost", "separation": "Separation cost"}
COLOURS = {"train": SOFT, "val": ACCENT}
STAGE, PROJECTION = "var(--card)", "var(--other)"  # colours of the page


@dataclass(frozen=True)
class EpochChart:
    """A picture of one quantity, and what the caption says above it."""

    title: str
    last: dict[str, str]  # of train and val, as far as they are there
    svg: str


def epoch_charts(metrics: Sequence[dict[str, Any]]) -> list[EpochChart]:
    """Draw one chart a quantity. Epochs are counted through the whole run."""
    epochs = [entry for entry in metrics if isinstance(entry.get("train"), dict)]
    names = list(dict.fromkeys(name for entry in epochs for part in COLOURS for name in entry.get(part) or {}))
    names.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    drawn = [_draw_chart(name, epochs, metrics) for name in names]
    return [chart for chart in drawn if chart is not None]


def _draw_chart(name: str, epochs: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]]) -> EpochChart | None:
    """Return None where no value can be drawn."""
    curves = {
        part: [
            (epoch + 0.5, value)
            for epoch, entry in enumerate(epochs)
            if (value := _number(entry, part, name)) is not None
        ]
        for part in COLOURS
    }
    curves = {part: points for part, points in curves.items() if points}
    if not curves:
        return None
    is_share, values = name == "accuracy", [value for points in curves.values() for _, value in points]
    ticks = [tick / 100 for tick in range(0, 101, 20)] if is_share else charts.round_ticks(min(values), max(values))
    x = Axis(0, len(epochs), LEFT, WIDTH - RIGHT)
    y = Axis(min(ticks[0], *values), max(ticks[-1], *values), HEIGHT - BOTTOM, TOP)
    parts = _draw_stages(epochs, x, y)
    parts += charts.draw_grid(x, y, ticks, [f"{tick:.0%}" if is_share else f"{tick:g}" for tick in ticks])
    parts += [draw_text(x(epoch - 0.5), HEIGHT - 8, str(epoch)) for epoch in _epoch_ticks(len(epochs))]
    done = 0
    for entry in metrics:
        done += isinstance(entry.get("train"), dict)
        if entry.get("stage") == "project":
            parts.append(charts.draw_line((x(done), x(done)), (y.end, y.start), PROJECTION, dashes="3 3"))
    parts += [charts.draw_curve([(x(e), y(v)) for e, v in points], COLOURS[part], 2) for part, points in curves.items()]
    title = TITLES.get(name, name.replace("_", " ").capitalize())
    last = {part: f"{points[-1][1]:{'.1%' if is_share else '.3g'}}" for part, points in curves.items()}
    return EpochChart(title, last, charts.draw_svg(WIDTH, HEIGHT, f"{title} by epoch", parts, font_size=10))


def _number(entry: dict[str, Any], part: str, name: str) -> float | None:
    """Return None where there is none, or one that cannot be drawn."""
    value = (entry.get(part) or {}).get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _draw_stages(epochs: Sequence[dict[str, Any]], x: Axis, y: Axis) -> list[str]:
    """Draw every other stage with a darker ground, and the names of those that have room for one."""
    parts, done = [], 0
    for number, (stage, group) in enumerate(groupby(str(entry["stage"]) for entry in epochs)):
        start, done = done, done + len(list(group))
        sides, name = (x(start), x(done)), stage.replace("_", " ")
        if number % 2 == 0:
            parts.append(charts.draw_bar(sides, (y.end, y.start), STAGE))
        if sides[1] - sides[0] > 24:
            parts.append(draw_text(sides[0] + 4, 16, name, anchor="start"))
    return parts


def _epoch_ticks(epochs: int) -> list[int]:
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, epochs) if epochs / step <= 6)
    return [1, *range(step, epochs + 1, step)] if step > 1 else list(range(1, epochs + 1))
