"""Folders that are whole or not there."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from likethat.errors import UserError


@contextlib.contextmanager
def whole_folder(out: Path, marker: str, *, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its place when the block succeeds.

    A folder that is not empty is replaced on request only, and only if it has the file `marker`: then it is an
    earlier one of the same kind, and not something of the user's.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; choose another --out.")
    if out.is_dir() and any(out.iterdir()):
        if not (out / marker).is_file():
            raise UserError(f"{out} is not empty and has no {marker}, so it is not replaced; choose another --out.")
        if not overwrite:
            raise UserError(f"{out} is there already; pass --overwrite to replace it, or another --out.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
            new, old = Path(temporary) / "new", Path(temporary) / "old"
            new.mkdir()
            yield new
            if out.exists():
                out.rename(old)
            new.rename(out)
    except OSError as error:
        shown = error.strerror or error
        raise UserError(f"{out} could not be written ({shown}); make room or choose another --out.") from error
