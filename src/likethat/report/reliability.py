"""The picture of how often a model is right against how often it says so."""

from __future__ import annotations

from collections.abc import Sequence

from likethat.metrics.reliability import Bin
from likethat.report.path import ACCENT, LINE, SOFT, svg_text

SIDE, LEFT, TOP, BOTTOM, RIGHT = 260, 58, 30, 44, 16


def draw_reliability(bins: Sequence[Bin]) -> str:
    """An SVG: a bar for each bin, as high as its share of right predictions, beside the line where both are equal.
    The more images a bin has, the fuller is its colour."""
    width, height = LEFT + SIDE + RIGHT, TOP + SIDE + BOTTOM

    def x(share: float) -> float:
        return round(LEFT + SIDE * share, 1)

    def y(share: float) -> float:
        return round(TOP + SIDE * (1 - share), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        'aria-label="Reliability: share of right predictions by predicted probability" '
        'font-family="system-ui, sans-serif" font-size="12">'
    ]
    for tick in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<line x1="{LEFT}" x2="{x(1)}" y1="{y(tick)}" y2="{y(tick)}" stroke="{LINE}"/>')
        parts.append(svg_text(LEFT - 8, y(tick) + 4, f"{tick:.0%}", SOFT, "end"))
        parts.append(svg_text(x(tick), y(0) + 18, f"{tick:.0%}", SOFT))
    most = max(found.images for found in bins)
    for found in bins:
        opacity = round(0.25 + 0.75 * found.images / most, 2)
        title = f"{found.images} images: {found.confidence:.1%} sure, {found.accuracy:.1%} right"
        parts.append(
            f'<rect x="{x(found.low) + 1:.1f}" width="{x(found.high) - x(found.low) - 2:.1f}" y="{y(found.accuracy)}" '
            f'height="{y(0) - y(found.accuracy):.1f}" fill="{ACCENT}" fill-opacity="{opacity}">'
            f"<title>{title}</title></rect>"
        )
        parts.append(f'<circle cx="{x(found.confidence)}" cy="{y(found.accuracy)}" r="3" fill="{ACCENT}"/>')
    parts.append(f'<line x1="{x(0)}" y1="{y(0)}" x2="{x(1)}" y2="{y(1)}" stroke="{SOFT}" stroke-dasharray="4 4"/>')
    parts.append(svg_text((x(0) + x(1)) / 2, height - 6, "probability of the predicted class", SOFT))
    parts.append(svg_text(LEFT - 40, 18, "right predictions", SOFT, "start"))
    return "\n".join([*parts, "</svg>\n"])
