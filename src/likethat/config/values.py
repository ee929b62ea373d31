"""Values of options, from a command line, a TOML file or Python, as the types that the options have."""

from __future__ import annotations

import math
import tomllib
import types
from collections.abc import Collection
from pathlib import Path
from typing import Any

from likethat.errors import UserError

NAMES = {bool: "true or false", bool | None: "true or false", int: "a whole number", float: "a number", str: "a word"}


def coerce(name: str, value: Any, kind: Any, choices: tuple[str, ...] = (), words: tuple[str, ...] = ()) -> Any:
    """Convert `value` to the option's type, or say in a sentence what the option takes; only that names `words`."""
    try:
        result = _cast(value, kind)
    except (TypeError, ValueError, OverflowError) as error:
        flag = "--" + name.replace("_", "-")
        raise UserError(f"{flag} takes {' or '.join((_describe(kind), *words))}, not {value!r}.") from error
    if choices and result not in choices:
        raise UserError(f"--{name.replace('_', '-')} takes {', '.join(choices)}, not {value!r}.")
    return result


def _cast(value: Any, kind: Any) -> Any:
    if isinstance(kind, types.GenericAlias) and kind.__origin__ is tuple:
        element, more = kind.__args__[0], kind.__args__[1:]
        values = value.replace("x", ",").split(",") if isinstance(value, str) else value
        values = [values] if isinstance(values, int | float) else list(values)
        if more and more[0] is not Ellipsis:
            values = values * len(kind.__args__) if len(values) == 1 else values
            if len(values) != len(kind.__args__):
                raise ValueError(value)
        return tuple(_cast(entry, element) for entry in values)
    if kind == bool | None:
        return None if value is None else _cast(value, bool)
    if kind is bool:
        if not isinstance(value, bool):
            raise TypeError(value)
        return value
    if kind is float and not math.isfinite(float(value)):
        raise ValueError(value)
    if isinstance(value, bool) or (kind is int and isinstance(value, float) and value != int(value)):
        raise TypeError(value)
    return kind(value)


def _describe(kind: Any) -> str:
    if isinstance(kind, types.GenericAlias):
        if kind == tuple[float, float]:
            return "two numbers like 0,4095"
        return "numbers separated by commas" if kind.__args__[-1] is Ellipsis else "one number, or two like 224x224"
    return NAMES[kind]


def read_toml(file: Path, sections: Collection[str]) -> dict[str, Any]:
    """Read options by name, either at the top of the file or under a section such as [train]."""
    try:
        document = tomllib.loads(file.read_text())
    except FileNotFoundError as error:
        raise UserError(f"The configuration file {file} does not exist.") from error
    except OSError as error:
        raise UserError(f"The configuration file {file} cannot be read ({error.strerror}).") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid TOML: {error}.") from error
    values: dict[str, Any] = {}
    for key, value in document.items():
        values.update(value if key in sections and isinstance(value, dict) else {key: value})
    return values
