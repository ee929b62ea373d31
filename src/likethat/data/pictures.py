"""Pictures that a user names: files, folders of them at any depth, and tables that list them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from likethat.config.settings import DataConfig
from likethat.data.folder import EXTENSIONS
from likethat.data.folder_kinds import made_by_likethat
from likethat.data.tables.rows import is_table
from likethat.data.tables.table import list_pictures


@dataclass(frozen=True)
class Skipped:
    """A file that is no picture, or none that can be read."""

    path: str
    reason: str


def find_pictures(sources: Sequence[str], named: DataConfig | None = None) -> tuple[list[str], list[Skipped]]:
    """Return named files as they are, all pictures in folders, at any depth, and those that tables list, by the columns
    that are named or else by the usual ones. Other files in folders are skipped, and so are runs and the like, whose
    pictures are likethat's own."""
    found: dict[str, None] = {}  # in order, each once
    skipped: list[Skipped] = []
    for source in sources:
        if is_table(Path(source)):
            columns, images = (named.columns, named.images) if named else ("", "")
            listed = list_pictures(Path(source), columns, images, strict=False)
            found.update(dict.fromkeys(str(path) for path, _ in listed))
            continue
        if not os.path.isdir(source):
            found[source] = None
            continue
        files = []
        for folder, inside, names in os.walk(source):
            own = [name for name in inside if made_by_likethat(Path(folder, name))]
            skipped += [Skipped(os.path.join(folder, name), "likethat made that folder") for name in sorted(own)]
            inside[:] = [name for name in inside if name not in own]
            files += [os.path.join(folder, name) for name in names]
        files.sort()
        pictures = [file for file in files if os.path.splitext(file)[1].lower() in EXTENSIONS]
        found.update(dict.fromkeys(pictures))
        others = sorted(set(files) - set(pictures))
        skipped += [Skipped(file, "its name does not end like a picture's") for file in others]
        if not files:
            skipped.append(Skipped(source, "the folder is empty"))
    return list(found), skipped
