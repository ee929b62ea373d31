"""The picture of how often a model is right against how often it says so."""

from __future__ import annotations

from collections.abc import Sequence

from likethat.metrics.reliability import Bin
from likethat.report import charts
from likethat.report.charts import ACCENT, SOFT, draw_text

SIDE, LEFT, TOP, BOTTOM, RIGHT = 260, 58, 30, 44, 16
TICKS = (0, 0.25, 0.5, 0.75, 1)


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
