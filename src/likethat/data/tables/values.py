"""What the values of a table's columns may be."""

from __future__ import annotations

import math
from collections.abc import Sequence

from likethat.data.decode import Box
from likethat.data.folder import PART_NAMES
from likethat.data.tables.columns import BOX

PART_OF = {name: part for part, names in PART_NAMES.items() for name in names}
LONGEST_LABEL = 200


class BadValue(ValueError):
    """What is wrong with a value of the table."""


def are_plain(paths: Sequence[str]) -> bool:
    """Return at once whether all paths are as `read_path` would return them."""
    together = "\0".join(paths)
    return (
        all(paths)
        and "\\" not in together
        and together.count("\0") == len(paths) - 1
        and paths == list(map(str.strip, paths))
    )


def read_path(text: str) -> str:
    path = text.strip().replace("\\", "/")  # of tables made on Windows
    if not path:
        raise BadValue("the path is empty")
    if "\0" in path:
        raise BadValue("the path has a zero byte, which no file's name can have")
    return path


def read_page(text: str) -> int:
    if not (text.strip().isdecimal() and 1 <= int(text) <= 999_999):
        raise BadValue(f"the page is '{text.strip()[:50]}'; pages are numbered from 1")
    return int(text)


def read_label(text: str) -> str:
    label = text.strip()
    if not label:
        raise BadValue("the label is empty; write a class into it, or remove the row")
    if len(label) > LONGEST_LABEL or not label.isprintable():
        raise BadValue(f"the label is longer than {LONGEST_LABEL} letters, or has some that cannot be shown")
    return label


def read_part(text: str) -> str:
    part = PART_OF.get(text.strip().lower())
    if part is None:
        raise BadValue(f"the split is '{text.strip()[:50]}'; write train, val or test")
    return part


def read_box(texts: Sequence[str]) -> Box:
    x0, y0, x1, y1 = (_number(text, name) for text, name in zip(texts, BOX, strict=True))
    if not (0 <= x0 < x1 and 0 <= y0 < y1):
        raise BadValue(f"the box {x0:g},{y0:g},{x1:g},{y1:g} is none: x0 and y0 are its upper left corner, from 0 on")
    return x0, y0, x1, y1


def read_weight(text: str) -> float:
    weight = _number(text, "weight")
    if weight <= 0:
        raise BadValue(f"the weight is {weight:g}; it must be above 0")
    return weight


def _number(text: str, name: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadValue(f"{name} is '{text.strip()[:50]}', which is no number")
    return number
