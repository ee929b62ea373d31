"""The picture of accuracy against sparsity: what every number of connections of the last layer is worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from likethat.report import charts
from likethat.report.charts import ACCENT, INK, SOFT, draw_line, draw_point, draw_text

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 22, 34, 48
LEAST_SPAN = 0.04  # of the accuracies on the axis


def draw_path(path: Sequence[dict[str, Any]], chosen: int, budget: int) -> str:
    """Return an SVG of the points (connections, accuracy), with the chosen one and the budget marked."""
    counts = [point["connections"] for point in path]
    shares = [point["accuracy"] for point in path]
    fewest, most = min(counts), max(counts)
    least = max(0.0, min(min(shares), max(shares) - LEAST_SPAN))
    ticks = charts.round_ticks(least, max(max(shares), least + LEAST_SPAN))
    floor, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    x = charts.Axis(fewest, max(most, fewest + 1), LEFT, right, logarithmic=True)
    y = charts.Axis(ticks[0], ticks[-1], floor, TOP)
    parts = charts.draw_grid(x, y, ticks, charts.percent_labels(ticks))
    for count in charts.logarithmic_ticks(fewest, most):
        parts.append(draw_line((x(count), x(count)), (floor, floor + 5), SOFT))
        parts.append(draw_text(x(count), floor + 18, f"{count:,}"))
    parts.append(draw_text((LEFT + right) / 2, HEIGHT - 8, "connections that are not zero"))
    parts.append(draw_text(LEFT - 8, 18, "accuracy on validation", anchor="start"))
    if fewest <= budget <= most:
        place = x(budget)
        parts.append(draw_line((place, place), (TOP, floor), SOFT, dashes="4 4"))
        shift, anchor = (-6, "end") if place > WIDTH / 2 else (6, "start")
        parts.append(draw_text(place + shift, floor - 8, f"budget {budget:,}", anchor=anchor))
    points = [(x(count), y(share)) for count, share in zip(counts, shares, strict=True)]
    parts.append(charts.draw_curve(points, ACCENT, 1.5))
    parts += [draw_point(*point, ACCENT, 3.5) for point in points]
    cx, cy = points[chosen]
    parts.append(f'<circle cx="{cx}" cy="{cy}" r="9" fill="none" stroke="{ACCENT}" stroke-width="2"/>')
    here = f"{counts[chosen]:,} connections, {shares[chosen]:.1%}"
    parts.append(draw_text(right, 18, f"chosen: {here}", INK, "end"))
    return charts.draw_svg(WIDTH, HEIGHT, "Validation accuracy by number of connections", parts)
