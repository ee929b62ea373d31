"""The table as a picture: test accuracies of every backbone side by side, with their spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from likethat.report import charts
from likethat.report.charts import INK, draw_point, draw_text
from likethat.workflows.reproduce.plan import Study, is_baseline
from likethat.workflows.reproduce.table import StudyRow, title_of

HEIGHT = 280  # of a block
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 64, 34
GRAYS, COLOURS = ("#a9b1bc", "#5b6470", "#22272e"), ("#0f766e", "#c2410c", "#6d28d9")  # of baselines, of presets
LEAST_SPAN = 0.02  # of the accuracies on the axis
STEP, GAP = 48, 36  # between the models of one backbone, and between backbones


def draw_table(study: Study, rows: Sequence[StudyRow]) -> str:
    """Return an SVG with a block for each kind of pictures; models without a figure yet are left out."""
    columns = len(dict.fromkeys(row.backbone for row in rows))
    width = max(LEFT + RIGHT + max(columns * _column(study), 360), _legend_width(study))
    parts = ['<rect width="100%" height="100%" fill="white"/>']
    for number, full in enumerate(study.views):
        block = [row for row in rows if row.full == full]
        heading = ("full images" if full else "cropped images") if len(study.views) > 1 else ""
        parts += _draw_block(study, block, number * HEIGHT, width, heading)
    label = "Test accuracy of baselines and ProtoPNets"
    return charts.draw_svg(width, HEIGHT * len(study.views), label, parts)


def _column(study: Study) -> int:
    """Return a width that its points and the longest name below fit in."""
    return max(len(study.kinds) * STEP + GAP, 8 * max(map(len, study.backbones)))


def _colours(study: Study) -> dict[str, str]:
    """Return a gray for each baseline and a colour for each preset."""
    grays, colours = cycle(GRAYS), cycle(COLOURS)
    return {kind: next(grays if is_baseline(kind) else colours) for kind in study.kinds}


def _legend_width(study: Study) -> int:
    return 32 + round(sum(34 + 6.6 * len(title_of(kind)) for kind in study.kinds))


def _draw_block(study: Study, rows: Sequence[StudyRow], start: int, width: int, heading: str) -> list[str]:
    points = [(row, summary) for row in rows if (summary := row.statistics("test"))]
    kinds, colours, column = study.kinds, _colours(study), _column(study)
    title = "Test accuracy" + (f", {heading}" if heading else "")
    parts = [draw_text(16, start + 20, title, INK, "start", is_bold=True)]
    left = 16.0
    for kind in kinds:
        parts.append(draw_point(left + 5, start + 38, colours[kind], 4.5))
        parts.append(draw_text(left + 14, start + 42, title_of(kind), anchor="start"))
        left += 34 + 6.6 * len(title_of(kind))
    if not points:
        return [*parts, draw_text(width / 2, start + HEIGHT / 2, "no run is finished yet")]
    ends = [summary["mean"] + sign * (summary["sd"] or 0.0) for _, summary in points for sign in (-1, 1)]
    middle, span = (min(ends) + max(ends)) / 2, max(max(ends) - min(ends), LEAST_SPAN)
    ticks = charts.round_ticks(max(0.0, middle - span / 2), min(1.0, middle + span / 2))
    backbones = list(dict.fromkeys(row.backbone for row in rows))
    x = charts.Axis(0, len(backbones), LEFT, LEFT + len(backbones) * column)
    y = charts.Axis(ticks[0], ticks[-1], start + HEIGHT - BOTTOM, start + TOP)
    across = charts.Axis(0, 1, LEFT, width - RIGHT)
    parts += charts.draw_grid(across, y, ticks, charts.percent_labels(ticks))
    for number, backbone in enumerate(backbones):
        parts.append(draw_text(x(number + 0.5), start + HEIGHT - 12, backbone, INK))
    for row, summary in points:
        place = kinds.index(row.kind)
        centre = round(x(backbones.index(row.backbone) + 0.5) + (place - len(kinds) / 2 + 0.2) * STEP, 1)
        colour, mean, deviation = colours[row.kind], summary["mean"], summary["sd"]
        if deviation:
            parts.append(charts.draw_line((centre, centre), (y(mean + deviation), y(mean - deviation)), colour, 2))
        parts.append(draw_point(centre, y(mean), colour, 4.5))
        parts.append(draw_text(centre + 8, y(mean) + 4, f"{100 * mean:.1f}", colour, "start"))
    return parts
