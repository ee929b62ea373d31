"""Pictures read ahead of the networks: by other processes where there are many, since threads share Python's lock.

What the networks see lies in memory that all processes share: a few batches, used in turn. Nothing but the ways back
to the files' pixels travels between processes.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import sys
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from likethat.data.decode import Box, ImageError, View, read_image, to_input
from likethat.data.reading.values import Range
from likethat.errors import UserError
from likethat.runs.classifier import Classifier
from likethat.runtime import usable_processors

TOGETHER = 16  # pictures that a worker reads before it is asked again
MANY = 2048  # pictures from which on processes are worth their start
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux

Views = tuple[View, ...]  # of a picture, one a member


@dataclass(frozen=True, slots=True)
class NamedPicture:
    """A picture that is asked about, and the box that it is cropped to first."""

    path: str
    box: Box | None = None


@dataclass(frozen=True)
class ReadBatch:
    """Pictures as the networks see them; the pictures themselves, which may be large, are not kept."""

    pictures: Sequence[NamedPicture]
    told: Sequence[Views | str]  # of each picture: its views, or what is wrong with it where it could not be read
    pixels: tuple[np.ndarray, ...]  # BHW3 uint8 of those that could be read, one a member; the next batch's, soon

    @property
    def views(self) -> list[Views]:
        return [told for told in self.told if not isinstance(told, str)]


@dataclass(frozen=True)
class _Desk:
    """What those who read have in common."""

    pictures: Sequence[NamedPicture]
    value_range: Range | None
    slots: tuple[tuple[np.ndarray, ...], ...]  # shared memory for some batches, one array a member

    def read(self, slot: int, row: int, picture: NamedPicture) -> Views | str:
        try:
            upright = read_image(Path(picture.path), value_range=self.value_range)
        except ImageError as error:
            return error.cause
        views = []
        for seen_BHW3 in self.slots[slot]:
            seen_BHW3[row], view = to_input(upright, picture.box, seen_BHW3.shape[1:3])
            views.append(view)
        return tuple(views)


_desks: dict[int, _Desk] = {}  # processes that are forked find theirs here; nothing of it is ever sent
_numbers = count()


def read_batches(
    classifier: Classifier, pictures: Sequence[NamedPicture], own: Sequence[int], batch: int
) -> Generator[ReadBatch]:
    """Yield those batches of `batch` pictures that have the numbers `own`. The pixels of one are good until the next is
    asked for."""
    workers = max(1, usable_processors() - 1)  # somebody feeds the networks
    ahead = 2 + 2 * workers * TOGETHER // batch
    sizes = [(batch, *network.backbone.input_size, 3) for network in classifier.networks]
    slots = tuple(tuple(map(_shared_array, sizes)) for _ in range(ahead))
    desk = next(_numbers)
    _desks[desk] = _Desk(pictures, classifier.value_range, slots)
    under_way: deque[tuple[int, range, list[Future[list[Views | str]]]]] = deque()
    pool = _start_pool(workers, len(own) * batch)
    try:
        for turn, number in enumerate(own):
            asked, slot = range(number * batch, min((number + 1) * batch, len(pictures))), turn % ahead
            parts = [asked[first : first + TOGETHER] for first in range(0, len(asked), TOGETHER)]
            under_way.append((slot, asked, [pool.submit(_read, desk, slot, asked.start, part) for part in parts]))
            if len(under_way) == ahead:
                yield _collect(_desks[desk], *under_way.popleft())
        while under_way:
            yield _collect(_desks[desk], *under_way.popleft())
    except BrokenProcessPool as error:
        raise UserError(
            "A process that reads pictures was killed, perhaps for want of memory; start the same command again, and "
            "it goes on."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
        del _desks[desk]


def _shared_array(shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, int(np.prod(shape))), np.uint8).reshape(shape)


def _start_pool(workers: int, pictures: int) -> Executor:
    """Return processes for many pictures where forking is safe, and threads otherwise."""
    if pictures < MANY or sys.platform != "linux":
        return ThreadPoolExecutor(workers)
    return ProcessPoolExecutor(workers, get_context("fork"), _outlive_nobody)


def _outlive_nobody() -> None:
    """Leave signals to the process that asked for pictures, and end with it, however that ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def _read(desk: int, slot: int, start: int, part: range) -> list[Views | str]:
    found = _desks[desk]
    return [found.read(slot, number - start, found.pictures[number]) for number in part]


def _collect(desk: _Desk, slot: int, asked: range, parts: Sequence[Future[list[Views | str]]]) -> ReadBatch:
    told = [one for part in parts for one in part.result()]
    good = [row for row, one in enumerate(told) if not isinstance(one, str)]
    kept = slice(len(told)) if len(good) == len(told) else good
    return ReadBatch(desk.pictures[asked.start : asked.stop], told, tuple(seen[kept] for seen in desk.slots[slot]))
