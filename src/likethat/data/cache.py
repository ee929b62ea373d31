"""The pixels of a data set, decoded once: in memory, or in a file as large as the disk allows."""

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from likethat.data.check import Problem, Progress, Report, examine, make_report, map_in_threads
from likethat.data.dataset import PARTS, DataSet, Sample
from likethat.data.decode import View, to_input
from likethat.data.journal import Journal, Row, header_of, journal_of, read_rows, stamp_of
from likethat.errors import UserError
from likethat.runtime import check_disk

WRITE_DOWN = 1000  # images after which those done are safe even from a loss of power


@dataclass(frozen=True)
class DecodedImages:
    """Row i belongs to sample i; rows of bad images are zero, and `problems` says which they are."""

    pixels: np.ndarray  # (N, H, W, 3) uint8
    sha256: list[str]
    problems: list[Problem]
    views: list[View | None]  # None of bad images


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
    progress: Progress | None = None,
) -> LoadedDataSet:
    """Checks and decodes the data set in one pass over its files.

    With `skip_bad`, bad files and their rows are left out; without, look at the report before using the pixels.
    """
    samples = dataset.all_samples()
    decoded = decode_samples(dataset.root, samples, size_hw, workers=workers, cache_file=cache_file, progress=progress)
    report = make_report(dataset, decoded.sha256, decoded.problems)
    pixels = decoded.pixels
    if skip_bad:
        bad, dataset = report.bad_paths(), report.without_bad()
        if cache_file and bad:
            journal_of(cache_file).unlink(missing_ok=True)  # rows move, so that it would lie
            pixels = np.load(cache_file, mmap_mode="r+")
        pixels = _move_together(pixels, [row for row, sample in enumerate(samples) if sample.path not in bad])
    starts = np.cumsum([len(dataset.part(part)) for part in PARTS])[:-1]
    return LoadedDataSet(dataset, dict(zip(PARTS, np.split(pixels, starts), strict=True)), report)


def decode_samples(
    root: Path,
    samples: Sequence[Sample],
    size_hw: tuple[int, int],
    *,
    workers: int | None = None,
    cache_file: Path | None = None,
    progress: Progress | None = None,
) -> DecodedImages:
    """The samples cropped and resized to `size_hw`; with `cache_file` (a .npy file) the pixels stay on disk, and a call
    that is stopped or killed leaves what is done to the next."""
    shape = (len(samples), *size_hw, 3)
    if cache_file is None:
        pixels = _allocate(shape)
        rows = [row for _, row in _decode_rows(pixels, root, samples, (), workers, progress)]
        return DecodedImages(pixels, *_told(rows))

    rows = _decode_to_file(cache_file, shape, root, samples, workers, progress)
    # Copy-on-write: torch warns of memory that it cannot write to, and nobody writes.
    return DecodedImages(np.load(cache_file, mmap_mode="c"), *_told(rows))


def _decode_to_file(
    cache_file: Path,
    shape: tuple[int, ...],
    root: Path,
    samples: Sequence[Sample],
    workers: int | None,
    progress: Progress | None,
) -> list[Row]:
    """Goes on where an earlier call was stopped or killed: what is done, of unchanged files, is not read again."""
    header = header_of(samples, shape)
    known = read_rows(cache_file, root, samples, header)
    if not known:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        remove_cache(cache_file)
        check_disk(cache_file.parent, math.prod(shape), "pixels")
    # A new file is one of zeros.
    pixels = np.lib.format.open_memmap(cache_file, mode="r+" if known else "w+", dtype=np.uint8, shape=shape)
    journal, unwritten = Journal(cache_file, header, goes_on=bool(known)), 0

    def write_down() -> None:
        pixels.flush()
        journal.flush()

    try:
        for number, row in _decode_rows(pixels, root, samples, known, workers, progress):
            journal.add(number, row)
            known[number] = row
            unwritten += 1
            if unwritten % WRITE_DOWN == 0:
                write_down()
    finally:
        write_down()
        journal.close()
    return [known[number] for number in range(len(samples))]


def remove_cache(cache_file: Path) -> None:
    """The pixels and what is known of them."""
    journal_of(cache_file).unlink(missing_ok=True)
    cache_file.unlink(missing_ok=True)


def _decode_rows(
    pixels: np.ndarray,
    root: Path,
    samples: Sequence[Sample],
    known: Container[int],
    workers: int | None,
    progress: Progress | None,
) -> Iterator[tuple[int, Row]]:
    """Fills the rows that are not known, in order."""
    size_hw = (pixels.shape[1], pixels.shape[2])
    wanted = [number for number in range(len(samples)) if number not in known]

    def decode(number: int) -> Row:
        sample, view = samples[number], None
        stamp = stamp_of(root / sample.path)  # before the file is read: a change in between is then seen later
        examined = examine(root, sample)
        if examined.image:
            pixels[number], view = to_input(examined.image, sample.box, size_hw)
        else:
            pixels[number] = 0
        return Row(examined.sha256, examined.problem, view, stamp if examined.sha256 else None)

    done = len(samples) - len(wanted)
    for number, row in zip(wanted, map_in_threads(decode, wanted, workers), strict=True):
        yield number, row
        done += 1
        if progress:
            progress(done, len(samples))


def _told(rows: Sequence[Row]) -> tuple[list[str], list[Problem], list[View | None]]:
    problems = [row.problem for row in rows if row.problem]
    return [row.sha256 for row in rows], problems, [row.view for row in rows]


def _allocate(shape: tuple[int, ...]) -> np.ndarray:
    try:
        return np.zeros(shape, np.uint8)
    except MemoryError as error:
        raise UserError(
            f"{_gigabytes(shape)} of memory are needed for the pixels: give a cache file on disk"
        ) from error


def _gigabytes(shape: tuple[int, ...]) -> str:
    return f"{math.prod(shape) / 1e9:.1f} GB"


def _move_together(pixels: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """The rows given, moved to the front: in place, since a copy may not fit into memory."""
    for new, old in enumerate(rows):
        if new != old:
            pixels[new] = pixels[old]
    return pixels[: len(rows)]
