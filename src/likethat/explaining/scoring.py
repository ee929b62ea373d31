"""Scoring sheets: which prototypes a picture matches, and how many points each one gives to which class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from PIL.Image import Image

from likethat.data.decode import View
from likethat.errors import UserError
from likethat.explaining.attribution import UPSAMPLING
from likethat.explaining.draw.render import seen_part
from likethat.explaining.matches import Match
from likethat.runs.calibration import Verdict

TOLERANCE = 1e-4  # of the logit, within which points must add up to it


@dataclass(frozen=True, eq=False)
class SheetRow:
    """One line of a scoring sheet: similarity x weight = points."""

    match: Match
    weight: float
    points: float

    def to_dict(self) -> dict[str, Any]:
        return {**self.match.to_dict(), "weight": self.weight, "points": self.points}


@dataclass(frozen=True, eq=False)
class Sheet:
    """All points of one class, most first. They add up to the logit."""

    name: str
    logit: float
    probability: float
    rows: tuple[SheetRow, ...]

    def main_rows(self, most: int) -> tuple[list[SheetRow], int, float]:
        """Return the rows that count most, in the sheet's order, the number of the others and the sum of those."""
        by_weight = sorted(self.rows, key=lambda row: -abs(row.points))
        main = set(by_weight[:most])
        rest = by_weight[most:]
        return [row for row in self.rows if row in main], len(rest), sum(row.points for row in rest)

    def to_dict(self) -> dict[str, Any]:
        rows = [row.to_dict() for row in self.rows]
        return {"name": self.name, "logit": self.logit, "probability": self.probability, "rows": rows}


@dataclass(frozen=True, eq=False)
class ScoredPicture:
    """The scoring sheets of a picture's likeliest classes and its nearest prototypes."""

    path: str | None  # None for a picture that came without one
    image: Image  # upright
    view: View
    classes: tuple[Sheet, ...]  # likeliest first
    nearest: tuple[Match, ...]
    rival: str | None  # the class that the prediction is compared with, if one was asked for
    run: Path  # where the prototypes' pictures are
    verdict: Verdict | None = None  # of a run that was calibrated
    attribution: str = UPSAMPLING  # how the parts of the picture were found
    sees_windows: bool = False  # whether each box is all that was seen for its similarity

    @property
    def predicted(self) -> Sheet:
        return self.classes[0]

    @property
    def heading(self) -> str:
        """Return the words that introduce the predicted class's name."""
        return "The nearest class is" if self.verdict and self.verdict.abstains else "This picture looks like"

    def sheet(self, name: str) -> Sheet:
        return next(sheet for sheet in self.classes if sheet.name == name)

    def difference(self) -> Sheet:
        """Return what each prototype adds to the predicted class's lead over the rival, as a sheet."""
        if self.rival is None:
            raise UserError("There is no class to compare with; ask for one with against=CLASS.")
        return self.lead(self.predicted.name, self.rival)

    def lead(self, name: str, other: str) -> Sheet:
        """Return what each prototype adds to the lead of one explained class over another."""
        best, rival = self.sheet(name), self.sheet(other)
        weights = {row.match: row.weight for row in best.rows}
        for row in rival.rows:
            weights[row.match] = weights.get(row.match, 0.0) - row.weight
        rows = [SheetRow(match, weight, match.similarity * weight) for match, weight in weights.items() if weight]
        lead = best.logit - rival.logit
        in_order = added_up(rows, lead, abs(best.logit) + abs(rival.logit))
        return Sheet(f"{best.name} − {rival.name}", lead, best.probability - rival.probability, in_order)

    def to_dict(self, maps: bool = False) -> dict[str, Any]:
        """Return the explanation as a JSON document; with `maps`, every prototype's similarity map by its id."""
        document: dict[str, Any] = {
            "path": self.path,
            "predicted": self.predicted.name,
            **({"verdict": self.verdict.to_dict()} if self.verdict else {}),
            "attribution": self.attribution,
            "classes": [sheet.to_dict() for sheet in self.classes],
            "nearest": [match.to_dict() for match in self.nearest],
        }
        if self.rival is not None:
            document["against"] = self.rival
            document["difference"] = [row.to_dict() for row in self.difference().rows]
        if maps:
            matches = [*self.nearest, *(row.match for sheet in self.classes for row in sheet.rows)]
            document["maps"] = {match.prototype.id: match.map_HW.tolist() for match in matches}
        return document

    def with_picture(self, picture: Image) -> Self:
        """Return the same with another copy of what the network saw. Boxes keep their numbers: pixels of the file."""
        whole = View((0, 0, *picture.size), self.view.input_hw, (picture.height, picture.width))
        return replace(self, image=picture, view=whole)

    @cached_property
    def picture(self) -> Image:
        """Return what the network saw of the picture, with the proportions it has in the file."""
        return seen_part(self.image, self.view)


def added_up(rows: list[SheetRow], total: float, scale: float) -> tuple[SheetRow, ...]:
    """Return the rows with most points first, once it is sure that they add up to what the network computed."""
    error = abs(sum(row.points for row in rows) - total)
    if not error <= TOLERANCE * max(1.0, scale):
        raise AssertionError(f"points differ from the logit {total} by {error}: the scoring sheet would be wrong")
    return tuple(sorted(rows, key=lambda row: (-row.points, row.match.prototype.id)))
