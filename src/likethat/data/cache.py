"""The pixels of a data set, decoded once: in memory, or in a file as large as the disk allows."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from likethat.data.check import DataProblem, Report, examine, make_report
from likethat.data.dataset import PARTS, DataSet, Sample
from likethat.data.decode import FileFacts, View, to_input
from likethat.data.journal import (
    Journal,
    JournalRow,
    header_of,
    journal_of,
    journals_of,
    read_rows,
    stamp_of,
    unchanged,
    write_together,
)
from likethat.data.near_duplicates import find_hasher, look_of
from likethat.data.reading.workers import map_many, shared_array
from likethat.distributed import barrier, broadcast_object, is_main_process, own_shard, rank, world_size
from likethat.errors import UserError
from likethat.progress import Advance
from likethat.runtime import check_disk, open_to_fill

CHUNK = 512  # images that a pass over files decodes and has in memory at a time; whole batches
WRITE_DOWN = 1000  # images after which those done are safe even from a loss of power


@dataclass(frozen=True)
class DecodedImages:
    """Row i belongs to sample i; rows of bad images are zero, and `problems` says which they are."""

    pixels: np.ndarray  # (N, H, W, 3) uint8
    sha256: list[str]
    problems: list[DataProblem]
    views: list[View | None]  # None of bad images
    facts: list[FileFacts]
    looks: list[str | None]  # None where they were not asked for


@dataclass(frozen=True)
class LoadedDataSet:
    """A data set with its pixels, row by row as its parts' samples."""

    dataset: DataSet
    pixels: dict[str, np.ndarray]  # part -> (N, H, W, 3) uint8
    report: Report


def load_dataset(
    dataset: DataSet,
    size_hw: tuple[int, int],
    *,
    skip_bad: bool = False,
    workers: int | None = None,
    cache_file: Path | None = None,
    progress: Advance | None = None,
    with_looks: bool = True,
) -> LoadedDataSet:
    """Check and decode the data set in one pass over its files; `with_looks` looks for near-duplicates, too.

    With `skip_bad`, bad files and their rows are left out; without, look at the report before using the pixels.
    """
    samples = dataset.all_samples()
    decoded = decode_samples(
        dataset.root, samples, size_hw, workers=workers, cache_file=cache_file, progress=progress, with_looks=with_looks
    )
    report = make_report(
        dataset, decoded.sha256, decoded.problems, decoded.facts, decoded.looks if with_looks else None
    )
    pixels = decoded.pixels
    if skip_bad:
        bad, dataset = report.bad_paths(), report.without_bad()
        good = [row for row, sample in enumerate(samples) if sample.path not in bad]
        if cache_file is None:
            _move_together(pixels, good)
        elif bad:
            if is_main_process():
                _remove_journals(cache_file)  # rows move, so that they would lie
                moved = np.load(cache_file, mmap_mode="r+")
                _move_together(moved, good)
                moved.flush()
            barrier()
            pixels = np.load(cache_file, mmap_mode="c")
        pixels = pixels[: len(good)]
    starts = np.cumsum([len(dataset.part(part)) for part in PARTS])[:-1]
    return LoadedDataSet(dataset, dict(zip(PARTS, np.split(pixels, starts), strict=True)), report)


def decode_samples(
    root: Path,
    samples: Sequence[Sample],
    size_hw: tuple[int, int],
    *,
    workers: int | None = None,
    cache_file: Path | None = None,
    progress: Advance | None = None,
    with_looks: bool = False,
) -> DecodedImages:
    """Return the samples cropped and resized to `size_hw`. With `cache_file` (a .npy file) the pixels stay on disk,
    and a call that is stopped or killed leaves what is done to the next. Processes that share the work fill one file
    together. `with_looks` adds what near-duplicates are found by."""
    shape = (len(samples), *size_hw, 3)
    if cache_file is None:
        pixels = _allocate(shape)
        wanted = range(len(samples))
        decoded = _decode_rows(pixels.__setitem__, wanted, root, samples, size_hw, workers, progress, with_looks)
        return DecodedImages(pixels, *_told([row for _, row in decoded]))

    rows = _decode_to_file(cache_file, shape, root, samples, workers, progress, with_looks)
    # Copy-on-write: torch warns of memory that it cannot write to, and nobody writes.
    return DecodedImages(np.load(cache_file, mmap_mode="c"), *_told(rows))


def decode_chunk(root: Path, samples: Sequence[Sample], size_hw: tuple[int, int]) -> DecodedImages:
    """Decode a part of a data set in use that fits in memory; stop where files can no longer be read."""
    decoded = decode_samples(root, samples, size_hw)
    if decoded.problems:
        listed = "; ".join(str(problem) for problem in decoded.problems[:5])
        raise UserError(f"{listed}. Mend the data, or say where it is with --data DATA.")
    return decoded


def _decode_to_file(
    cache_file: Path,
    shape: tuple[int, ...],
    root: Path,
    samples: Sequence[Sample],
    workers: int | None,
    progress: Advance | None,
    with_looks: bool,
) -> list[JournalRow]:
    """Go on where an earlier call was stopped or killed: rows that are done, of unchanged files, are not read again."""
    header = header_of(samples, shape)
    wanted = broadcast_object(_open_cache(cache_file, shape, header, root, samples) if is_main_process() else [])
    own = wanted[own_shard(len(wanted))]
    journal = Journal(journal_of(cache_file, rank()), header, goes_on=is_main_process())
    known, size = len(samples) - len(wanted), math.prod(shape[1:])
    start = cache_file.stat().st_size - len(samples) * size
    with open_to_fill(cache_file) as file:

        def write(number: int, pixel_HW3: np.ndarray) -> None:
            with open_to_fill(cache_file) as own_file:  # which no other thread or process moves about in
                own_file.seek(start + number * size)
                own_file.write(pixel_HW3.tobytes())

        def tell(done: int, total: int) -> None:
            if progress:
                progress(known + done, known + total)

        try:
            decoded = _decode_rows(write, own, root, samples, (shape[1], shape[2]), workers, tell, with_looks)
            for done, (number, row) in enumerate(decoded, start=1):
                journal.add(number, row)
                if done % WRITE_DOWN == 0:
                    os.fsync(file.fileno())
                    journal.flush()
        finally:
            os.fsync(file.fileno())
            journal.close()
    barrier()
    rows = read_rows([journal_of(cache_file, process) for process in range(world_size())], header)
    barrier()  # nobody changes what another still reads
    return [rows[number] for number in range(len(samples))]


def _open_cache(
    cache_file: Path, shape: tuple[int, ...], header: str, root: Path, samples: Sequence[Sample]
) -> list[int]:
    """Make the file and its journal where there are none; return the numbers of the rows still to be filled."""
    cache_file.parent.mkdir(parents=True, exist_ok=True)
    journals = journals_of(cache_file)
    known = unchanged(read_rows(journals, header), root, samples) if cache_file.is_file() else {}
    if not known:
        remove_cache(cache_file)
        check_disk(cache_file.parent, math.prod(shape), "pixels")
        np.lib.format.open_memmap(cache_file, mode="w+", dtype=np.uint8, shape=shape)  # of zeros
    if not known or len(journals) > 1:
        write_together(cache_file, header, known)
    return [number for number in range(len(samples)) if number not in known]


def remove_cache(cache_file: Path) -> None:
    """Remove the pixels and the journals about them."""
    if cache_file.parent.is_dir():
        _remove_journals(cache_file)
        cache_file.unlink(missing_ok=True)


def _remove_journals(cache_file: Path) -> None:
    for journal in journals_of(cache_file):
        journal.unlink()


def _decode_rows(
    write: Callable[[int, np.ndarray], None],
    wanted: Sequence[int],
    root: Path,
    samples: Sequence[Sample],
    size_hw: tuple[int, int],
    workers: int | None,
    progress: Advance | None,
    with_looks: bool,
) -> Iterator[tuple[int, JournalRow]]:
    """Yield the wanted rows in order, each when its pixels are written. Those who decode also write, perhaps in other
    processes."""

    def decode(number: int) -> JournalRow:
        sample, view, look = samples[number], None, None
        stamp = stamp_of(root / sample.path)  # before the file is read: a change in between is then seen later
        examined = examine(root, sample)
        pixel_HW3 = np.zeros((*size_hw, 3), np.uint8)
        if examined.image:
            pixel_HW3, view = to_input(examined.image, sample.box, size_hw)
            look = look_of(pixel_HW3) if with_looks and sample.group is None else None
        write(number, pixel_HW3)
        stamp = stamp if examined.sha256 else None
        return JournalRow(examined.sha256, examined.problem, view, stamp, examined.facts, look)

    if with_looks:
        find_hasher()  # imported here, and not by every process that reads
    with closing(map_many(decode, wanted, len(wanted), workers)) as found:
        for done, (number, row) in enumerate(zip(wanted, found, strict=True), start=1):
            yield number, row
            if progress:
                progress(done, len(wanted))


def _told(
    rows: Sequence[JournalRow],
) -> tuple[list[str], list[DataProblem], list[View | None], list[FileFacts], list[str | None]]:
    problems = [row.problem for row in rows if row.problem]
    columns = ([getattr(row, name) for row in rows] for name in ("view", "facts", "look"))
    return [row.sha256 for row in rows], problems, *columns  # type: ignore[return-value]


def _allocate(shape: tuple[int, ...]) -> np.ndarray:
    try:
        return shared_array(shape)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"{math.prod(shape) / 1e9:.1f} GB of memory are needed for the pixels: give a cache file on disk"
        ) from error


def _move_together(pixels: np.ndarray, rows: Sequence[int]) -> None:
    """Move the rows to the front, in place, since a copy may not fit into memory."""
    for new, old in enumerate(rows):
        if new != old:
            pixels[new] = pixels[old]
