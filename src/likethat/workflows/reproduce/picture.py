"""The table as a picture: test accuracies of every backbone side by side, with their spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence

from likethat.report.curves import nice_ticks
from likethat.report.path import svg_text
from likethat.workflows.reproduce.plan import PLAIN, Study
from likethat.workflows.reproduce.table import Row, title_of

HEIGHT = 280  # of a block
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 64, 34
INK, SOFT, LINE = "#1c2024", "#626a75", "#e3e6ea"
COLOURS = ("#8a93a0", "#0f766e", "#c2410c", "#6d28d9")  # the plain classifier, then the presets
LEAST_SPAN = 0.02  # of the accuracies on the axis
STEP, GAP = 48, 36  # between the models of one backbone, and between backbones


def draw_table(study: Study, rows: Sequence[Row]) -> str:
    """An SVG with a block for each kind of pictures; models without a figure yet are left out."""
    columns = len(dict.fromkeys(row.backbone for row in rows))
    width = LEFT + RIGHT + max(columns * _column(study), 360)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT * len(study.views)}" '
        f'width="{width}" role="img" aria-label="Test accuracy of plain classifiers and ProtoPNets" '
        'font-family="system-ui, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, full in enumerate(study.views):
        block = [row for row in rows if row.full == full]
        heading = ("full images" if full else "cropped images") if len(study.views) > 1 else ""
        parts.append(f'<g transform="translate(0 {number * HEIGHT})">')
        parts += [*_draw_block(study, block, width, heading), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _column(study: Study) -> int:
    """Wide enough for its points and for the longest name below."""
    return max((1 + len(study.presets)) * STEP + GAP, 8 * max(map(len, study.backbones)))


def _draw_block(study: Study, rows: Sequence[Row], width: int, heading: str) -> list[str]:
    points = [(row, summary) for row in rows if (summary := row.statistics("test"))]
    kinds, column = (PLAIN, *study.presets), _column(study)
    parts = [svg_text(16, 20, "Test accuracy" + (f", {heading}" if heading else ""), INK, "start", bold=True)]
    x = 16.0
    for kind in kinds:
        colour = COLOURS[kinds.index(kind) % len(COLOURS)]
        parts.append(f'<circle cx="{x + 5}" cy="38" r="4.5" fill="{colour}"/>')
        parts.append(svg_text(x + 14, 42, title_of(kind), SOFT, "start"))
        x += 34 + 6.6 * len(title_of(kind))
    if not points:
        return [*parts, svg_text(width / 2, HEIGHT / 2, "no run is finished yet", SOFT)]
    ends = [summary["mean"] + sign * (summary["sd"] or 0.0) for _, summary in points for sign in (-1, 1)]
    middle, span = (min(ends) + max(ends)) / 2, max(max(ends) - min(ends), LEAST_SPAN)
    ticks = nice_ticks(max(0.0, middle - span / 2), min(1.0, middle + span / 2))
    bottom, top = ticks[0], ticks[-1]

    def y(share: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (top - share) / (top - bottom), 1)

    digits = 0 if all(abs(100 * tick - round(100 * tick)) < 1e-6 for tick in ticks) else 1
    for tick in ticks:
        parts.append(f'<line x1="{LEFT}" x2="{width - RIGHT}" y1="{y(tick)}" y2="{y(tick)}" stroke="{LINE}"/>')
        parts.append(svg_text(LEFT - 8, y(tick) + 4, f"{tick:.{digits}%}", SOFT, "end"))
    backbones = list(dict.fromkeys(row.backbone for row in rows))
    for number, backbone in enumerate(backbones):
        parts.append(svg_text(LEFT + (number + 0.5) * column, HEIGHT - 12, backbone, INK))
    for row, summary in points:
        place = kinds.index(row.kind)
        centre = LEFT + (backbones.index(row.backbone) + 0.5) * column + (place - len(kinds) / 2 + 0.2) * STEP
        colour, mean = COLOURS[place % len(COLOURS)], summary["mean"]
        if summary["sd"]:
            low, high = y(mean - summary["sd"]), y(mean + summary["sd"])
            parts.append(
                f'<line x1="{centre}" x2="{centre}" y1="{high}" y2="{low}" stroke="{colour}" stroke-width="2"/>'
            )
        parts.append(f'<circle cx="{centre}" cy="{y(mean)}" r="4.5" fill="{colour}"/>')
        parts.append(svg_text(centre + 8, y(mean) + 4, f"{100 * mean:.1f}", colour, "start"))
    return parts
