"""What the JSON files of a run must look like: each is checked against types, and the first value that does not fit is
named."""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import lru_cache
from pathlib import Path
from typing import Any

from likethat.errors import UserError
from likethat.runs.atomic_files import read_json

LARGEST = 2**53  # whole numbers beyond it are counts of nothing
RESTORE = "restore it from a copy or train again"
NAMES = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false"}


def read_document(path: Path, kind: Any, remedy: str = RESTORE) -> Any:
    """Return the content of a JSON file as `kind`, see `parse`."""
    document = read_json(path)
    try:
        return parse(kind, document)
    except ValueError as error:
        raise damaged(path, error, remedy) from error


def damaged(path: Path, error: object, remedy: str = RESTORE) -> UserError:
    return UserError(f"{path} is damaged ({str(error).rstrip('.')[:300]}); {remedy}.")


def parse(kind: Any, value: Any, place: str = "it") -> Any:
    """Return a JSON value as `kind`, or raise a ValueError that names its place.

    A kind is int, float, str, bool, Any, a dataclass (all of its fields, and no others), `tuple[X, ...]`, a tuple of so
    many, `dict[str, X]`, `X | None`, or a dictionary of kinds: fields that must be there, besides which there may be
    others.
    """
    if kind is Any:
        return value
    if isinstance(kind, dict):
        fields = _expect(dict, value, place, "a list of fields")
        return {**fields, **{name: parse(inner, *_field(fields, name, place)) for name, inner in kind.items()}}
    if isinstance(kind, types.UnionType):
        (inner,) = (option for option in kind.__args__ if option is not types.NoneType)
        return None if value is None else parse(inner, value, place)
    if dataclasses.is_dataclass(kind):
        return _parse_dataclass(kind, value, place)
    match typing.get_origin(kind), typing.get_args(kind):
        case (origin, inners) if origin is tuple:
            entries = _expect(list, value, place, "a list")
            if inners[-1] is Ellipsis:
                inners = inners[:1] * len(entries)
            if len(entries) != len(inners):
                raise ValueError(f"{place} has {len(entries)} entries instead of {len(inners)}")
            return tuple(
                parse(inner, entry, f"{place}[{number}]")
                for number, (inner, entry) in enumerate(zip(inners, entries, strict=True))
            )
        case (origin, (_, inner)) if origin is dict:
            fields = _expect(dict, value, place, "a list of fields")
            return {name: parse(inner, entry, f"{place}.{name}") for name, entry in fields.items()}
    return _parse_plain(kind, value, place)


def _parse_plain(kind: Any, value: Any, place: str) -> Any:
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{place} is {_shown(value)} instead of {NAMES[kind]}")
    if kind in (int, float) and not abs(value) <= LARGEST:
        raise ValueError(f"{place} is not {NAMES[kind]} of a size that can be")
    return float(value) if kind is float else value


@lru_cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _parse_dataclass(kind: Any, value: Any, place: str) -> Any:
    fields = _expect(dict, value, place, "a list of fields")
    hints = _hints(kind)
    if unknown := sorted(fields.keys() - hints.keys()):
        raise ValueError(f"{place} has a field '{unknown[0][:50]}' that nobody knows")
    without = {field.name for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING}
    return kind(
        **{
            name: parse(inner, *_field(fields, name, place))
            for name, inner in hints.items()
            if name in fields or name not in without
        }
    )


def _field(fields: dict[str, Any], name: str, place: str) -> tuple[Any, str]:
    if name not in fields:
        raise ValueError(f"{place} lacks the field '{name}'")
    return fields[name], name if place == "it" else f"{place}.{name}"


def _expect(kind: type, value: Any, place: str, name: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{place} is {_shown(value)} instead of {name}")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a list"
    return repr(value[:50] if isinstance(value, str) else value)[:60]
