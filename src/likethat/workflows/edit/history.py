"""Who corrected what, when and why: the lines of edits.jsonl."""

from __future__ import annotations

import getpass
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from likethat.errors import UserError
from likethat.runs import layout
from likethat.runs.atomic_files import write_text
from likethat.runs.classifier import Prototype
from likethat.runs.schema import damaged

BAN, MERGE, NAME, REPLACE, WITHDRAW = "ban", "merge", "name", "replace", "withdraw"
LATER = ("withdrawn", "new_patches")  # fields that a line need not have
MOST_LETTERS = 200  # of a name, and of who edits
MOST_REASONS = 2_000  # letters of a reason


@dataclass(frozen=True)
class Edit:
    """One correction. Numbers of prototypes are those of the run it was made in."""

    kind: str
    prototypes: tuple[int, ...]  # the first one of a merger stays
    patches: tuple[dict[str, Any], ...]  # what these prototypes were: class, image, place in the map
    name: str | None  # given to the prototypes; None takes their name away
    new_patch: dict[str, Any] | None  # that took the prototype's place
    who: str
    when: str  # UTC
    why: str
    run: str
    before: dict[str, float]  # accuracy and cross entropy on validation
    after: dict[str, float]
    withdrawn: tuple[str, ...] = ()  # pictures that the run no longer knows
    new_patches: tuple[dict[str, Any], ...] = ()  # that took the place of prototypes cut from them

    def to_dict(self) -> dict[str, Any]:
        document = asdict(self)
        if self.kind != WITHDRAW:
            return {name: value for name, value in document.items() if name not in LATER}
        return document

    def __str__(self) -> str:
        numbers = [str(number) for number in self.prototypes]
        if self.kind == WITHDRAW:
            listed = self.withdrawn[0] if len(self.withdrawn) == 1 else f"{len(self.withdrawn)} pictures"
            cut = f"replaced {', '.join(numbers)}" if numbers else "no prototype was cut from them"
            return f"withdrew {listed}; {cut}"
        if self.kind == MERGE:
            return f"merged {', '.join(numbers[1:])} into {numbers[0]}"
        if self.kind == NAME:
            listed = ", ".join(numbers)
            return f"called {listed} “{self.name}”" if self.name else f"took the name of {listed} away"
        if self.kind == REPLACE:
            assert self.new_patch is not None
            return f"replaced {numbers[0]} by a patch of {self.new_patch['path']}"
        return f"banned {', '.join(numbers)}"


def describe_patch(prototype: Prototype) -> dict[str, Any]:
    names = {"class": prototype.class_name, "name": prototype.name}
    return {**names, "path": prototype.path, "row": prototype.row, "column": prototype.column}


def who_is_there(who: str | None) -> str:
    if who is None:
        try:
            return getpass.getuser()
        except (KeyError, OSError):  # a user without a name, as in containers
            return ""
    return clean(who, MOST_LETTERS, "who edits")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def clean(text: str, most: int, what: str) -> str:
    """Return the text as one line without control characters, of bounded length."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    if len(text) > most:
        raise UserError(f"The text for {what} has {len(text)} letters, and at most {most} are kept; shorten it.")
    return text


def read_history(run: Path) -> list[Edit]:
    """Return the edits that led to a run, oldest first."""
    edits = []
    for line in layout.read_edits(run):
        fields: dict[str, Any] = {name: line[name] for name in layout.EDIT}
        fields |= {name: tuple(line[name]) for name in LATER if name in line}
        edits.append(Edit(**fields))
    for edit in edits:
        says_what = edit.withdrawn if edit.kind == WITHDRAW else edit.prototypes
        if not says_what or (edit.kind == REPLACE and "path" not in (edit.new_patch or {})):
            raise damaged(run / layout.EDITS, f"an edit ({edit.kind[:50]}) does not say what it is of")
    return edits


def write_history(run: Path, earlier: Sequence[dict[str, Any]], edits: Sequence[Edit]) -> None:
    lines = [*earlier, *(edit.to_dict() for edit in edits)]
    write_text(run / layout.EDITS, "".join(json.dumps(line) + "\n" for line in lines))
