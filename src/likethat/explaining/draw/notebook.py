"""An explained picture in a notebook: its class, and the parts that gave the most points. The page has all of it."""

from __future__ import annotations

from PIL.Image import Image

from likethat.explaining.draw.pictures import data_uri
from likethat.explaining.draw.render import cut_out, jpeg, shrink
from likethat.explaining.scoring import RowGroup, ScoredPicture
from likethat.runs.notebook import card, note, ranking, shown, table

PARTS = 4
PICTURE_SIDE, PART_SIDE = 200, 72  # pixels


def notebook_html(explanation: ScoredPicture) -> str:
    best = explanation.predicted
    groups, others, rest = best.main_groups(PARTS)
    rows = [("this part", "looks like that", "points", ""), *(_line(explanation, group) for group in groups)]
    if others:
        rows.append(("", "", f"{rest:+.2f}", f"{others} further prototype{'s' if others > 1 else ''}"))
    rows.append(("", "", f"<strong>{best.logit:.2f}</strong>", f"total for {shown(best.name)}"))
    probabilities = {sheet.name: sheet.probability for sheet in explanation.classes}
    return card(
        f"{explanation.heading}: {best.name}",
        note(explanation.verdict.sentence() if explanation.verdict else ""),
        note(explanation.hidden_note),
        table([(_image(explanation.picture, PICTURE_SIDE, "your picture"), ranking(probabilities))]),
        table(rows),
    )


def _line(explanation: ScoredPicture, group: RowGroup) -> tuple[str, str, str, str]:
    match, count = group.lead.match, len(group.rows)
    prototype = match.prototype
    title = prototype.title if count == 1 else f"{count} prototypes"
    return (
        _image(cut_out(explanation.picture, match.share), PART_SIDE, "this part of your picture"),
        _image(explanation.source_part(match), PART_SIDE, prototype.title),
        f"{group.points:+.2f}",
        shown(f"{title} of {prototype.class_name}"),
    )


def _image(image: Image, side: int, label: str) -> str:
    return f'<img src="{data_uri(jpeg(shrink(image, side)), "jpeg")}" alt="{shown(label)}"/>'
