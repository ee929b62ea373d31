"""The pieces that charts are drawn of, in SVG: axes, lines, points, bars and text, in the colours of their page."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Colours of the page that the chart stands in, or their own.
INK, SOFT = "var(--ink, #1c2024)", "var(--soft, #626a75)"
LINE, ACCENT = "var(--line, #e3e6ea)", "var(--accent, #0f766e)"


@dataclass(frozen=True)
class Axis:
    """Where the values from `low` to `high` lie on the picture, from the pixel `start` to the pixel `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, here = (math.log(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return round(self.start + (self.end - self.start) * (here - low) / (high - low), 1)


def draw_svg(width: float, height: float, label: str, parts: Iterable[str], font_size: int = 12) -> str:
    """Return the picture of these parts; `label` says to those who do not see it what it shows."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{html.escape(label)}" font-family="system-ui, sans-serif" font-size="{font_size}">'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def draw_text(
    x: float, y: float, text: str, colour: str = SOFT, anchor: str = "middle", *, is_bold: bool = False
) -> str:
    weight = ' font-weight="600"' if is_bold else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}"{weight}>{html.escape(text)}</text>'


def draw_line(x: Sequence[float], y: Sequence[float], colour: str, width: float = 1, dashes: str = "") -> str:
    """Draw a line from (x[0], y[0]) to (x[1], y[1])."""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    ends = f'x1="{x[0]}" y1="{y[0]}" x2="{x[1]}" y2="{y[1]}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"{dashed}/>'


def draw_curve(points: Iterable[tuple[float, float]], colour: str, width: float) -> str:
    """Draw straight lines from point to point."""
    places = " ".join(f"{x},{y}" for x, y in points)
    return (
        f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}" '
        'stroke-linejoin="round" stroke-linecap="round"/>'
    )


def draw_point(x: float, y: float, colour: str, radius: float) -> str:
    return f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{colour}"/>'


def draw_bar(x: Sequence[float], y: Sequence[float], colour: str, opacity: float = 1.0, title: str = "") -> str:
    """Draw a bar between two places on each axis, `y` from top to bottom; whoever points at it reads the title."""
    size = f'x="{x[0]:.1f}" y="{y[0]:.1f}" width="{x[1] - x[0]:.1f}" height="{y[1] - y[0]:.1f}"'
    said = f"<title>{html.escape(title)}</title>" if title else ""
    return f'<rect {size} fill="{colour}" fill-opacity="{opacity}">{said}</rect>'


def draw_grid(x: Axis, y: Axis, ticks: Sequence[float], labels: Sequence[str]) -> list[str]:
    """Draw a line across the field for each tick of the y axis, and its label on the left."""
    parts = []
    for tick, label in zip(ticks, labels, strict=True):
        parts.append(draw_line((x.start, x.end), (y(tick), y(tick)), LINE))
        parts.append(draw_text(x.start - 8, y(tick) + 4, label, anchor="end"))
    return parts


def round_ticks(low: float, high: float) -> list[float]:
    """Return two to six round numbers that span the values."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= 4)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def logarithmic_ticks(low: int, high: int) -> list[int]:
    """Return at most six round numbers between the two, spread over a logarithmic axis, or else the ends."""
    round_numbers = [digit * 10**power for power in range(13) for digit in (1, 2, 5)]
    inside = [number for number in round_numbers if low <= number <= high]
    if len(inside) > 6:
        inside = [number for number in inside if str(number)[0] == "1"]
    return inside[:: max(1, -(-len(inside) // 6))] if len(inside) > 1 else sorted({low, high})


def percent_labels(ticks: Sequence[float]) -> list[str]:
    """Return the ticks in percent, with as many digits as tell them apart."""
    digits = max(0, -math.floor(math.log10(100 * (ticks[1] - ticks[0])) + 1e-9))
    return [f"{tick:.{digits}%}" for tick in ticks]
