"""The section of the report that shows how good the explanations are: figures, how often the model is
right against how often it says so, best and worst prototypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from likethat.data.dataset import IMAGES_OF
from likethat.errors import UserError
from likethat.metrics.figure import MetricFigure
from likethat.metrics.reliability import Bin
from likethat.report import charts
from likethat.report.charts import ACCENT, SOFT, draw_text
from likethat.runs import layout
from likethat.runs.atomic_files import read_json
from likethat.runs.classifier import Prototype

SHOWN = 5  # best prototypes, and as many worst
SIDE, LEFT, TOP, BOTTOM, RIGHT = 260, 58, 30, 44, 16  # of the chart of reliability and its margins
TICKS = (0, 0.25, 0.5, 0.75, 1)


@dataclass(frozen=True)
class Marked:
    """A prototype, what was measured of it, and the mean of that."""

    prototype: Prototype
    marks: dict[str, float]
    mean: float


@dataclass(frozen=True)
class Measured:
    """One measurement; `kind` says on which images."""

    kind: str
    groups: dict[str, list[MetricFigure]]
    images: int
    best: list[Marked]
    worst: list[Marked]
    reliability: str | None  # an SVG


def read_measured(run: Path, prototypes: Sequence[Prototype]) -> list[Measured]:
    """Read what `evaluate --interpretability` left in the run folder, of test and of validation images; none before."""
    paths = {IMAGES_OF[part]: run / name for part, name in layout.INTERPRETABILITY.items()}
    return [_read(kind, path, prototypes) for kind, path in paths.items() if path.is_file()]


def _read(kind: str, path: Path, prototypes: Sequence[Prototype]) -> Measured:
    document: dict[str, Any] = read_json(path)
    try:
        figures = [MetricFigure(**figure) for figure in document["figures"]]
        groups = {name: [f for f in figures if f.group == name] for name in dict.fromkeys(f.group for f in figures)}
        marked = _marked(document["by_prototype"], prototypes)
        bins = [Bin(**found) for found in document.get("reliability", ())]
        images = int(document["evaluation"]["images"])
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path} is damaged ({error!r}); remove it and measure again.") from error
    shown = min(SHOWN, len(marked) // 2)
    worst = marked[len(marked) - shown :][::-1]
    return Measured(kind, groups, images, marked[:shown], worst, draw_reliability(bins) if bins else None)


def _marked(columns: dict[str, list[float | None]], prototypes: Sequence[Prototype]) -> list[Marked]:
    """Return the prototypes of which something is known, best first."""
    found = []
    for number, prototype in enumerate(prototypes):
        marks = {name: value for name, values in columns.items() if (value := values[number]) is not None}
        if marks:
            found.append(Marked(prototype, marks, sum(marks.values()) / len(marks)))
    return sorted(found, key=lambda marked: (-marked.mean, marked.prototype.id))


def draw_reliability(bins: Sequence[Bin]) -> str:
    """Return an SVG: a bar for each bin, as high as its share of right predictions, beside the line where both are
    equal. The more images a bin has, the fuller is its colour."""
    width, height = LEFT + SIDE + RIGHT, TOP + SIDE + BOTTOM
    x, y = charts.Axis(0, 1, LEFT, LEFT + SIDE), charts.Axis(0, 1, TOP + SIDE, TOP)
    parts = charts.draw_grid(x, y, TICKS, charts.percent_labels(TICKS))
    parts += [draw_text(x(tick), y(0) + 18, f"{tick:.0%}") for tick in TICKS]
    most = max(found.images for found in bins)
    for found in bins:
        title = f"{found.images} images: {found.confidence:.1%} sure, {found.accuracy:.1%} right"
        opacity = round(0.25 + 0.75 * found.images / most, 2)
        sides = x(found.low) + 1, x(found.high) - 1
        parts.append(charts.draw_bar(sides, (y(found.accuracy), y(0)), ACCENT, opacity, title))
        parts.append(charts.draw_point(x(found.confidence), y(found.accuracy), ACCENT, 3))
    parts.append(charts.draw_line((x(0), x(1)), (y(0), y(1)), SOFT, dashes="4 4"))
    parts.append(draw_text((x(0) + x(1)) / 2, height - 6, "probability of the predicted class"))
    parts.append(draw_text(LEFT - 40, 18, "right predictions", anchor="start"))
    return charts.draw_svg(width, height, "Reliability: share of right predictions by predicted probability", parts)
