"""The digests of a run's files, written last: what has changed since is seen. Who forges files can forge digests too;
what the data proves depends on none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from likethat.data.files import digest_file
from likethat.runs import layout
from likethat.runs.atomic_files import unreadable, write_json
from likethat.runs.schema import read_document

FORMAT = 1
# Files that stay as they are once a run is made, and files that verbs make anew. A model card is its owner's to edit.
FIXED = (
    layout.CONFIG,
    layout.MODEL,
    layout.PROTOTYPES,
    layout.METRICS,
    layout.EDITS,
    layout.PATH,
    layout.NEAR_DUPLICATES,
)
LATER = (
    layout.CALIBRATION,
    layout.IMAGES,
    *layout.INTERPRETABILITY.values(),
    layout.REPORT,
    layout.ATTRIBUTED,
    layout.CONFUSIONS,
)


def write_manifest(run: Path) -> None:
    """Write the digests of a run that is complete."""
    # One after another: most files are small, and threads would spend more time on handing over Python's lock.
    _write(run, {name: _digest(run / name) for name in _files_of(run)})


def update_manifest(run: Path, *names: str) -> None:
    """Write new digests of files that were made anew, and no others: a change to those must still be seen."""
    if (run / layout.MANIFEST).is_file():
        _write(run, _read(run) | {name: _digest(run / name) for name in names})


def compare_with_manifest(run: Path) -> tuple[int, list[str]] | None:
    """Return how many files the manifest has, and which are not as they were written; None of a run without one."""
    if not os.path.lexists(run / layout.MANIFEST):  # a link that leads nowhere is damage, not absence
        return None
    expected, found = _read(run), set(_files_of(run))
    there = [name for name in expected if name in found]
    changed = [f"{name} (changed)" for name in there if _digest(run / name) != expected[name]]
    missing = [f"{name} (missing)" for name in expected if name not in found]
    return len(expected), [*changed, *missing, *(f"{name} (added)" for name in sorted(found - expected.keys()))]


def _read(run: Path) -> dict[str, str]:
    remedy = "restore it from a copy, or remove it to go without digests"
    files: dict[str, str] = read_document(run / layout.MANIFEST, {"files": dict[str, str]}, remedy)["files"]
    return files


def _write(run: Path, digests: dict[str, str]) -> None:
    write_json(run / layout.MANIFEST, {"format": FORMAT, "files": dict(sorted(digests.items()))})


def _digest(path: Path) -> str:
    try:
        return digest_file(path)
    except OSError as error:
        raise unreadable(path, error) from error


def _files_of(run: Path) -> Iterator[str]:
    """Yield the names of all files that the manifest must have. Of members, those that stay as they are: each member
    has a manifest of its own besides."""
    for folder in (run, *sorted((run / layout.MEMBERS).glob("*"))):
        names = [name for name in FIXED + LATER * (folder == run) if (folder / name).is_file()]
        pictures = (path for path in sorted((folder / layout.PICTURES).glob("*")) if path.is_file())
        for path in (*(folder / name for name in names), *pictures):
            yield path.relative_to(run).as_posix()
