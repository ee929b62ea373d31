"""Scoring sheets: which prototypes a picture matches, and how many points each one gives to which class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from PIL.Image import Image

from likethat.data.decode import Box, View
from likethat.errors import UserError
from likethat.explaining.attribution import UPSAMPLING
from likethat.explaining.draw.render import cut_out, read_picture, seen_part
from likethat.explaining.matches import Match
from likethat.runs.calibration import Verdict

TOLERANCE = 1e-4  # of the logit, within which points must add up to it
SAME_PART = 0.5  # least intersection over union of two boxes around the same part


def overlap(a: Box, b: Box) -> float:
    """Return the intersection over union of two boxes."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(0.0, width) * max(0.0, height)
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def group_by_part(boxes: Sequence[Box]) -> list[list[int]]:
    """Return the numbers of the boxes in groups, one for each part.

    Boxes come in order of importance. Each joins the first group whose first box it overlaps by SAME_PART or more, or
    begins a group of its own. All boxes of a group thus lie on its first one: no chain of neighbours grows across the
    picture.
    """
    groups: list[list[int]] = []
    for number, box in enumerate(boxes):
        same = (group for group in groups if overlap(box, boxes[group[0]]) >= SAME_PART)
        group = next(same, None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    return groups


@dataclass(frozen=True, eq=False)
class SheetRow:
    """One line of a scoring sheet: similarity x weight = points."""

    match: Match
    weight: float
    points: float

    def to_dict(self) -> dict[str, Any]:
        return {**self.match.to_dict(), "weight": self.weight, "points": self.points}


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Lines that say the same: prototypes of one class that show the same part of the picture, strongest first."""

    rows: tuple[SheetRow, ...]

    @property
    def lead(self) -> SheetRow:
        """Return the strongest line, which stands for all."""
        return self.rows[0]

    @cached_property
    def points(self) -> float:
        return sum(row.points for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        prototypes = [row.match.prototype.id for row in self.rows]
        return {"prototypes": prototypes, "points": self.points, "box": list(self.lead.match.box)}


@dataclass(frozen=True, eq=False)
class Sheet:
    """All points of one class, most first. They add up to the logit.

    With a rival, all that decides between the two: the connections, points, logit and probability of the class less
    those of the rival.
    """

    name: str
    logit: float
    probability: float
    rows: tuple[SheetRow, ...]
    rival: str | None = None

    @property
    def title(self) -> str:
        return f"Evidence for {self.name}" if self.rival is None else f"Why {self.name} and not {self.rival}"

    @property
    def total_title(self) -> str:
        return f"Total points for {self.name}" if self.rival is None else f"Lead of {self.name} over {self.rival}"

    @cached_property
    def groups(self) -> tuple[RowGroup, ...]:
        """Return the rows by the part they show, strongest group first. Their points add up to the logit, too.

        Only prototypes of the same class are grouped, and what speaks for the class never with what speaks against it.
        """
        alike: dict[tuple[str, bool], list[SheetRow]] = {}
        for row in sorted(self.rows, key=lambda row: -abs(row.points)):
            alike.setdefault((row.match.prototype.class_name, row.points < 0), []).append(row)
        groups = [
            RowGroup(tuple(rows[number] for number in numbers))
            for rows in alike.values()
            for numbers in group_by_part([row.match.share for row in rows])
        ]
        return tuple(sorted(groups, key=lambda group: -abs(group.points)))

    def main_groups(self, most: int) -> tuple[tuple[RowGroup, ...], int, float]:
        """Return the strongest groups, the number of prototypes in the others and the sum of their points."""
        rest = self.groups[most:]
        return self.groups[:most], sum(len(group.rows) for group in rest), sum(group.points for group in rest)

    def to_dict(self) -> dict[str, Any]:
        head = {"name": self.name, "logit": self.logit, "probability": self.probability}
        rows, groups = [row.to_dict() for row in self.rows], [group.to_dict() for group in self.groups]
        return {**head, "rows": rows, "groups": groups}


@dataclass(frozen=True, eq=False)
class ScoredPicture:
    """The scoring sheets of a picture's likeliest classes and its nearest prototypes."""

    path: str | None  # None for a picture that came without one
    image: Image  # upright
    view: View
    classes: tuple[Sheet, ...]  # likeliest first
    nearest: tuple[Match, ...]
    rival: str | None  # the class that the prediction is compared with; None where one class alone is explained
    run: Path  # where the prototypes' pictures are
    verdict: Verdict | None = None  # of a run that was calibrated
    attribution: str = UPSAMPLING  # how the parts of the picture were found
    sees_windows: bool = False  # whether each box is all that was seen for its similarity
    hidden: tuple[Box, ...] = ()  # parts that were painted over first, in pixels of the file

    @property
    def predicted(self) -> Sheet:
        return self.classes[0]

    @property
    def heading(self) -> str:
        """Return the words that introduce the predicted class's name."""
        return "The nearest class is" if self.verdict and self.verdict.abstains else "This picture looks like"

    @property
    def hidden_note(self) -> str:
        """Return what must be said about a picture with hidden parts; nothing about a whole one."""
        parts = "A part" if len(self.hidden) == 1 else f"{len(self.hidden)} parts"
        painted = "painted over with the mean colour of the rest before the model saw the picture"
        return f"{parts} of it {'was' if len(self.hidden) == 1 else 'were'} {painted}." if self.hidden else ""

    @cached_property
    def sheets(self) -> tuple[Sheet, ...]:
        """Return all sheets in the order in which they are read: what decides first, then the classes' own."""
        return self.classes if self.rival is None else (self.difference(), *self.classes)

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
        return Sheet(best.name, lead, best.probability - rival.probability, in_order, rival.name)

    def to_dict(self, maps: bool = False) -> dict[str, Any]:
        """Return the explanation as a JSON document; with `maps`, every prototype's similarity map by its id."""
        document: dict[str, Any] = {
            "path": self.path,
            "predicted": self.predicted.name,
            **({"verdict": self.verdict.to_dict()} if self.verdict else {}),
            "attribution": self.attribution,
            **({"hidden": [list(box) for box in self.hidden]} if self.hidden else {}),
            "classes": [sheet.to_dict() for sheet in self.classes],
            "nearest": [match.to_dict() for match in self.nearest],
        }
        if self.rival is not None:
            document["against"] = self.rival
            lead = self.difference().to_dict()
            document |= {"difference": lead["rows"], "difference_groups": lead["groups"]}
        if maps:
            matches = [*self.nearest, *(row.match for sheet in self.classes for row in sheet.rows)]
            document["maps"] = {match.prototype.id: match.map_HW.tolist() for match in matches}
        return document

    def with_picture(self, picture: Image) -> Self:
        """Return the same with another copy of what the network saw. Boxes keep their numbers: pixels of the file."""
        whole = View((0, 0, *picture.size), self.view.input_hw, (picture.height, picture.width))
        return replace(self, image=picture, view=whole)

    def source_part(self, match: Match) -> Image:
        """Return the part of a prototype's training picture that was found like the part of this one."""
        if match.source_share is None:
            return read_picture(self.run, match.prototype.crop)
        return cut_out(read_picture(self.run, match.prototype.source), match.source_share)

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
