"""The picture of accuracy against sparsity: what every number of connections of the last layer is worth."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from likethat.report.curves import nice_ticks

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 22, 34, 48
LEAST_SPAN = 0.04  # of the accuracies on the axis
# Colours of the page the picture stands in, or their own.
INK, SOFT = "var(--ink, #1c2024)", "var(--soft, #626a75)"
LINE, ACCENT = "var(--line, #e3e6ea)", "var(--accent, #0f766e)"


def draw_path(path: Sequence[dict[str, Any]], chosen: int, budget: int) -> str:
    """An SVG of the points (connections, accuracy), with the chosen one and the budget marked."""
    counts = [point["connections"] for point in path]
    shares = [point["accuracy"] for point in path]
    low, high = math.log(min(counts)), math.log(max(max(counts), min(counts) + 1))
    least = max(0.0, min(min(shares), max(shares) - LEAST_SPAN))
    ticks = nice_ticks(least, max(max(shares), least + LEAST_SPAN))
    bottom, top = ticks[0], ticks[-1]

    def x(count: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (math.log(count) - low) / (high - low), 1)

    def y(share: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (top - share) / (top - bottom), 1)

    floor = HEIGHT - BOTTOM
    digits = max(0, -math.floor(math.log10(100 * (ticks[1] - ticks[0])) + 1e-9))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        'aria-label="Validation accuracy by number of connections" font-family="system-ui, sans-serif" font-size="12">'
    ]
    for tick in ticks:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}" stroke="{LINE}"/>')
        parts.append(svg_text(LEFT - 8, y(tick) + 4, f"{tick:.{digits}%}", SOFT, "end"))
    for count in count_ticks(min(counts), max(counts)):
        parts.append(f'<line x1="{x(count)}" x2="{x(count)}" y1="{floor}" y2="{floor + 5}" stroke="{SOFT}"/>')
        parts.append(svg_text(x(count), floor + 18, f"{count:,}", SOFT))
    parts.append(svg_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "connections that are not zero", SOFT))
    parts.append(svg_text(LEFT - 8, 18, "accuracy on validation", SOFT, "start"))
    if min(counts) <= budget <= max(counts):
        parts.append(
            f'<line x1="{x(budget)}" x2="{x(budget)}" y1="{TOP}" y2="{floor}" stroke="{SOFT}" stroke-dasharray="4 4"/>'
        )
        anchor = "end" if x(budget) > WIDTH / 2 else "start"
        shift = -6 if anchor == "end" else 6
        parts.append(svg_text(x(budget) + shift, floor - 8, f"budget {budget:,}", SOFT, anchor))
    points = " ".join(f"{x(count)},{y(share)}" for count, share in zip(counts, shares, strict=True))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{ACCENT}" stroke-width="1.5"/>')
    for number, point in enumerate(points.split(" ")):
        cx, cy = point.split(",")
        if number == chosen:
            parts.append(f'<circle cx="{cx}" cy="{cy}" r="9" fill="none" stroke="{ACCENT}" stroke-width="2"/>')
        parts.append(f'<circle cx="{cx}" cy="{cy}" r="3.5" fill="{ACCENT}"/>')
    here = f"{counts[chosen]:,} connections, {shares[chosen]:.1%}"
    parts.append(svg_text(WIDTH - RIGHT, 18, f"chosen: {here}", INK, "end"))
    return "\n".join([*parts, "</svg>\n"])


def svg_text(x: float, y: float, text: str, colour: str, anchor: str = "middle", *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}"{weight}>{html.escape(text)}</text>'


def count_ticks(low: int, high: int) -> list[int]:
    """At most six round numbers between the two, spread over a logarithmic axis; the ends where there are none."""
    round_numbers = [digit * 10**power for power in range(13) for digit in (1, 2, 5)]
    inside = [number for number in round_numbers if low <= number <= high]
    if len(inside) > 6:
        inside = [number for number in inside if str(number)[0] == "1"]
    return inside[:: max(1, -(-len(inside) // 6))] if len(inside) > 1 else sorted({low, high})
