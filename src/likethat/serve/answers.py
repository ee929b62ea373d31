"""Explanations as the page wants them: only what it shows, with places as shares of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from likethat.data.decode import Box
from likethat.explaining.draw.pictures import MOST_ROWS, Pictures, data_uri
from likethat.explaining.draw.render import jpeg, shrink
from likethat.explaining.explanation import Explanation, Options, explain_batch
from likethat.explaining.gallery import CROP_SIDE
from likethat.explaining.hiding import colour_of_hidden
from likethat.explaining.matches import Match
from likethat.explaining.scoring import Sheet, SheetRow
from likethat.models.protopnet import Output, summed_logits
from likethat.runs.classifier import Classifier, PreparedPicture
from likethat.serve.catalogue import Catalogue
from likethat.serve.store import Kept


@dataclass(frozen=True)
class Question:
    """What is asked about a kept picture: the sheet of one class, or of two to be compared."""

    name: str | None  # if none is named, the predicted class, compared with the runner-up
    options: Options
    hide: tuple[Box, ...] = ()  # in shares of the picture

    def classes(self, ranked: Sequence[str]) -> list[str]:
        """Return the classes to be shown, given all in the order of their points. Nothing is compared with itself."""
        name, against = self.name or ranked[0], self.options.against
        if against is None:
            return [name] if self.name else list(ranked[:2])
        return [name, against if against != name else next(other for other in ranked if other != name)]


def explained(
    classifier: Classifier, outputs: Sequence[Output], prepared: PreparedPicture, name: str | None, options: Options
) -> Explanation:
    """Explain a picture, with the small copy that is kept in place of the one that came."""
    (explanation,) = explain_batch(classifier, [prepared], options, paths=[name], outputs=outputs)
    return explanation.with_picture(prepared.image)


def ranking(classifier: Classifier, outputs: Sequence[Output]) -> list[dict[str, Any]]:
    """Return all classes, likeliest first."""
    logit_K = summed_logits(outputs)[0].cpu().double()
    probability_K = logit_K.softmax(0).tolist()
    rows = zip(classifier.classes, logit_K.tolist(), probability_K, strict=True)
    return sorted(
        ({"name": name, "logit": logit, "probability": probability} for name, logit, probability in rows),
        key=lambda row: -row["logit"],
    )


def page_document(
    explanation: Explanation, kept: Kept, ranked: list[dict[str, Any]], classes: Sequence[str], catalogue: Catalogue
) -> dict[str, Any]:
    """Return the document of the page; `classes` are those whose sheets are shown: one, or two to be compared."""
    sheets = [explanation.sheet(name) for name in classes]
    if len(sheets) == 2:
        sheets.append(explanation.lead(*classes))
    matches: dict[int, Match] = {match.prototype.id: match for match in explanation.nearest}
    shown = [_sheet(sheet, matches) for sheet in sheets]
    pictures = Pictures(inline=True)
    return {
        "id": kept.id,
        "name": kept.name,
        "picture": f"/pictures/{kept.id}/picture.jpg",
        "size": list(kept.size),
        "predicted": explanation.predicted.name,
        "verdict": explanation.verdict.to_dict() if explanation.verdict else None,
        "ranking": ranked,
        "sheets": shown[:2],
        "difference": shown[2] if len(shown) == 3 else None,
        "nearest": [match.prototype.id for match in explanation.nearest],
        "matches": {id: _match(explanation, match, pictures, catalogue) for id, match in matches.items()},
    }


def hidden_document(
    explanation: Explanation, prepared: PreparedPicture, ranked: list[dict[str, Any]], classes: Sequence[str]
) -> dict[str, Any]:
    """Return what is left of all points of these classes, by prototype, and where each finds its part now."""
    sheets = [explanation.sheet(name) for name in classes]
    if len(sheets) == 2:
        sheets.append(explanation.lead(*classes))
    left = [
        {"logit": sheet.logit, "points": {row.match.prototype.id: row.points for row in sheet.rows}} for sheet in sheets
    ]
    matches = [row.match for sheet in sheets for row in sheet.rows]
    return {
        "colour": "#{:02x}{:02x}{:02x}".format(*colour_of_hidden(prepared)),
        "hidden": [list(box) for box in prepared.hidden],
        "predicted": explanation.predicted.name,
        "ranking": ranked,
        "sheets": left[:2],
        "difference": left[2] if len(left) == 3 else None,
        "matches": {m.prototype.id: {"similarity": m.similarity, "box": list(m.share)} for m in matches},
    }


def _sheet(sheet: Sheet, matches: dict[int, Match]) -> dict[str, Any]:
    groups, others, rest = sheet.main_groups(MOST_ROWS)
    matches.update((row.match.prototype.id, row.match) for group in groups for row in group.rows)
    return {
        "name": sheet.name,
        "logit": sheet.logit,
        "probability": sheet.probability,
        "groups": [{"points": group.points, "rows": [_row(row) for row in group.rows]} for group in groups],
        "others": others,
        "rest": rest,
    }


def _row(row: SheetRow) -> dict[str, Any]:
    return {"prototype": row.match.prototype.id, "weight": row.weight, "points": row.points}


def _match(explanation: Explanation, match: Match, pictures: Pictures, catalogue: Catalogue) -> dict[str, Any]:
    prototype = match.prototype
    return {
        "class": prototype.class_name,
        "name": prototype.name,
        "path": prototype.path,
        "similarity": match.similarity,
        "attribution": match.attribution,
        "box": list(match.share),
        "map": [[round(value, 4) for value in row] for row in match.map_HW.tolist()],
        "heat": pictures.activation(explanation, match).heat,
        **catalogue.pictures_of(prototype),
        **_found_in_source(explanation, match),
    }


def _found_in_source(explanation: Explanation, match: Match) -> dict[str, Any]:
    """Return where the prototype lies in its training picture, where that is not where the run says."""
    if match.source_share is None:
        return {}
    part = shrink(explanation.source_part(match), CROP_SIDE)
    return {"source_box": list(match.source_share), "crop": data_uri(jpeg(part), "jpeg")}
