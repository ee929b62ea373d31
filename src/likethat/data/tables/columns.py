"""Which column of a table is which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from likethat.errors import UserError

BOX = ("x0", "y0", "x1", "y1")
NEEDED = ("path", "label")
COLUMNS = ("path", "label", "split", "group", *BOX, "mask", "weight", "page")


def parse_columns(text: str) -> dict[str, str]:
    """Read `label=diagnosis,path=file`: what a column means, and the name that it has in the table."""
    named: dict[str, str] = {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        meaning, equals, name = (word.strip() for word in entry.partition("="))
        if not (equals and name) or meaning not in COLUMNS:
            raise UserError(
                f"--columns takes entries like label=diagnosis, not '{entry}'; before '=' stands one of "
                f"{', '.join(COLUMNS)}."
            )
        if meaning in named:
            raise UserError(f"--columns names {meaning} twice; name it once.")
        named[meaning] = name
    return named


def find_columns(
    header: Sequence[str], named: Mapping[str, str], table: str, *, strict: bool, wanted: Sequence[str]
) -> dict[str, int]:
    """Return the place of every wanted column that the table has. A table that is not the one that columns were named
    for (`strict` is False) may also have the usual names."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(header):
        places.setdefault(name.strip().casefold(), []).append(place)
    listed = ", ".join(name.strip() for name in header[:20]) or "none"
    found: dict[str, int] = {}
    for meaning in wanted:
        name = named.get(meaning, meaning)
        if meaning in named and name.casefold() not in places:
            if strict:
                raise UserError(f"{table} has no column '{name}', which --columns names; its columns are {listed}.")
            name = meaning
        here = places.get(name.casefold(), [])
        if len(here) > 1:
            raise UserError(f"{table} has {len(here)} columns called '{name}'; rename or remove all but one.")
        if here:
            found[meaning] = here[0]
        elif meaning in NEEDED:
            raise UserError(
                f"{table} has no column '{meaning}'; its columns are {listed}. Say which one it is, as in "
                f"--columns {meaning}={(header[0].strip() if header else '') or 'NAME'}."
            )
    if 0 < len(found.keys() & set(BOX)) < 4:
        missing = ", ".join(name for name in BOX if name not in found)
        raise UserError(f"{table} has a box without {missing}; a box needs the columns {', '.join(BOX)}.")
    return found
