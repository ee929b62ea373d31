"""Names that are not valid UTF-8, as archives of other systems leave them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FILE, CLASS = os.fsdecode(b"caf\xe9"), os.fsdecode(b"M\xf6we")


def needs_such_names(folder: Path) -> None:
    """Skip the test where the file system refuses such names."""
    try:
        (folder / FILE).touch()
    except OSError as error:
        pytest.skip(f"the file system takes no names that are not valid UTF-8 ({error.strerror})")
    (folder / FILE).unlink()
