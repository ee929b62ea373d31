"""Pictures that a user names: files, and folders of them at any depth."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from likethat.data.folder import EXTENSIONS
from likethat.data.folder_kinds import made_by_likethat


@dataclass(frozen=True)
class Skipped:
    """A file that is no picture, or none that can be read."""

    path: str
    reason: str


def find_pictures(sources: Sequence[str]) -> tuple[list[str], list[Skipped]]:
    """Return named files as they are, and all pictures in folders, at any depth. Other files in folders are skipped,
    and so are runs and the like, whose pictures are likethat's own."""
    found: dict[str, None] = {}  # in order, each once
    skipped: list[Skipped] = []
    for source in sources:
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
        pictures = [file for file in files if Path(file).suffix.lower() in EXTENSIONS]
        found.update(dict.fromkeys(pictures))
        others = sorted(set(files) - set(pictures))
        skipped += [Skipped(file, "its name does not end like a picture's") for file in others]
        if not files:
            skipped.append(Skipped(source, "the folder is empty"))
    return list(found), skipped
