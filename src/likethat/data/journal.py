"""Which rows of a pixel cache are done: a line each in a file beside it, so that a killed run need not read its images
again. Processes that fill a cache together have a file each."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from likethat.data.check import DataProblem
from likethat.data.dataset import Sample
from likethat.data.decode import FileFacts, View
from likethat.data.reading.pages import split_page
from likethat.data.reading.values import ValueRange

Stamp = tuple[int, int]  # size and time of the last change


@dataclass(frozen=True, slots=True)
class JournalRow:
    """What reading a file has found. Without a stamp, as when it could not be opened, it is read again."""

    sha256: str
    problem: DataProblem | None
    view: View | None  # None of bad images
    stamp: Stamp | None
    facts: FileFacts
    look: str | None  # for near-duplicates


def journal_of(cache_file: Path, process: int = 0) -> Path:
    return cache_file.with_name(f"{cache_file.name}.rows{process or ''}")


def journals_of(cache_file: Path) -> list[Path]:
    """Return all journals of the cache, the main process's first."""
    name = journal_of(cache_file).name
    return sorted(path for path in cache_file.parent.iterdir() if path.name.startswith(name))


def stamp_of(path: Path) -> Stamp | None:
    try:
        found = os.stat(split_page(path)[0])
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def header_of(samples: Sequence[Sample], shape: tuple[int, ...]) -> str:
    """Return the header, which holds what must be the same for a row to mean the same."""
    digest = hashlib.sha256()
    for sample in samples:
        # File names need not be valid Unicode; surrogateescape gives back the bytes they have on disk.
        line = f"{sample.path}\0{sample.box}\0{sample.value_range}\0{sample.mask}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return json.dumps({"shape": shape, "samples": digest.hexdigest()})


def read_rows(journals: Iterable[Path], header: str) -> dict[int, JournalRow]:
    """Read the rows that are done, by what was written last; skip journals with another header."""
    rows: dict[int, JournalRow] = {}
    for journal in journals:
        with journal.open(encoding="utf-8") as lines:
            if next(lines, "").rstrip("\n") == header:
                rows.update(parsed for line in lines if (parsed := _parse(line)) is not None)
    return rows


def unchanged(rows: Mapping[int, JournalRow], root: Path, samples: Sequence[Sample]) -> dict[int, JournalRow]:
    """Return the rows whose files are as they were."""
    return {
        number: row
        for number, row in rows.items()
        if row.stamp is not None and row.stamp == stamp_of(root / samples[number].path)
    }


def write_together(cache_file: Path, header: str, rows: Mapping[int, JournalRow]) -> None:
    """Replace all journals by one of these rows."""
    target = journal_of(cache_file)
    fresh = Journal(target.with_name(f".{target.name}"), header, goes_on=False)
    for number, row in rows.items():
        fresh.add(number, row)
    fresh.close()
    os.replace(fresh.path, target)
    for journal in journals_of(cache_file)[1:]:
        journal.unlink()


class Journal:
    """Lines reach the disk when told; what they speak of must be there before."""

    def __init__(self, path: Path, header: str, *, goes_on: bool) -> None:
        self.path = path
        self.file = path.open("a" if goes_on else "w", encoding="utf-8")
        # A line that was cut short by a kill is ended, so that the next one stands alone.
        self.file.write("\n" if goes_on else f"{header}\n")

    def add(self, number: int, row: JournalRow) -> None:
        problem, view = (None if value is None else astuple(value) for value in (row.problem, row.view))
        line = [number, row.sha256, problem, view, row.stamp, astuple(row.facts), row.look]
        self.file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.flush()
        self.file.close()


def _parse(line: str) -> tuple[int, JournalRow] | None:
    """Parse one line; return None for an empty or a cut one."""
    try:
        number, sha256, problem, view, stamp, (pages, values), look = json.loads(line)
    except ValueError:
        return None
    return number, JournalRow(
        sha256,
        None if problem is None else DataProblem(*problem),
        None if view is None else _view(view),
        None if stamp is None else tuple(stamp),
        FileFacts(pages, None if values is None else ValueRange(*values)),
        look,
    )


def _view(values: list[Any]) -> View:
    crop, input_hw, upright_hw, orientation = values
    return View(tuple(crop), tuple(input_hw), tuple(upright_hw), orientation)
