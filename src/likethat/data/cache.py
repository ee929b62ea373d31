"""The pixels of a data set, decoded once: in memory, or in a file as large as the disk allows."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from likethat.data.check import Problem, Progress, Report, examine, make_report, map_in_threads
from likethat.data.dataset import PARTS, DataSet, Sample
from likethat.data.decode import View, to_input
from likethat.errors import UserError
from likethat.runtime import check_disk


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
        if cache_file:
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
    """The samples cropped and resized to `size_hw`; with `cache_file` (a .npy file) the pixels stay on disk."""
    shape = (len(samples), *size_hw, 3)
    if cache_file is None:
        pixels = _allocate(shape)
        return DecodedImages(pixels, *_decode_into(pixels, root, samples, workers, progress))

    cache_file.parent.mkdir(parents=True, exist_ok=True)
    check_disk(cache_file.parent, math.prod(shape), "pixels")
    unfinished = cache_file.with_name(f"{cache_file.name}.{os.getpid()}.tmp")
    try:
        # open_memmap makes a file of zeros.
        pixels = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.uint8, shape=shape)
        found = _decode_into(pixels, root, samples, workers, progress)
        pixels.flush()
        del pixels  # Windows renames no file that is mapped
        os.replace(unfinished, cache_file)
    finally:
        unfinished.unlink(missing_ok=True)
    return DecodedImages(np.load(cache_file, mmap_mode="r"), *found)


def _decode_into(
    pixels: np.ndarray, root: Path, samples: Sequence[Sample], workers: int | None, progress: Progress | None
) -> tuple[list[str], list[Problem], list[View | None]]:
    size_hw = (pixels.shape[1], pixels.shape[2])

    def decode(row: int) -> tuple[str, Problem | None, View | None]:
        examined, view = examine(root, samples[row]), None
        if examined.image:
            pixels[row], view = to_input(examined.image, samples[row].box, size_hw)
        return examined.sha256, examined.problem, view

    hashes: list[str] = []
    problems: list[Problem] = []
    views: list[View | None] = []
    for sha256, problem, view in map_in_threads(decode, range(len(samples)), workers):
        hashes.append(sha256)
        views.append(view)
        if problem:
            problems.append(problem)
        if progress:
            progress(len(hashes), len(samples))
    return hashes, problems, views


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
