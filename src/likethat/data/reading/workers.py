"""Work on many files at a time: by threads, or by processes where there is much of it, since threads share Python's
lock.

Processes are forked, so that nothing but results travels between them. What is large, such as pixels, is written where
all of them see it: into shared memory, or into a file.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import count, islice
from math import prod
from multiprocessing import get_context
from typing import Any, TypeVar

import numpy as np

from likethat.errors import UserError
from likethat.runtime import usable_processors

Item = TypeVar("Item")
Result = TypeVar("Result")

TOGETHER = 16  # items that a process works on before it is asked again
UNDER_WAY = 2 * TOGETHER  # items for each worker that are at work or done, at most, and not yet asked for
MANY = 2048  # items from which on processes are worth their start
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


def map_in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None
) -> Iterator[Result]:
    """Yield results in order, from one thread per processor unless told otherwise; few are under way at any time.

    Pillow lets go of Python's lock while it decodes and resizes, so threads keep a few processors busy.
    """
    workers = usable_processors() if workers is None else workers
    under_way: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                under_way.append(pool.submit(function, item))
                if len(under_way) >= 8 * workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


_tasks: dict[int, tuple[Callable[[Any], Any], mmap.mmap]] = {}  # forked processes find theirs here
_numbers = count()


def map_many(
    function: Callable[[Item], Result], items: Iterable[Item], total: int, workers: int | None = None
) -> Generator[Result]:
    """Yield results in order, from forked processes where `total` items are many and forking is safe, and from threads
    otherwise. The function must not touch a GPU, nor change memory that is not a `shared_array`. Close what this
    returns, so that nobody works on after an error."""
    workers = usable_processors() if workers is None else workers
    if total < MANY or sys.platform != "linux":
        yield from map_in_threads(function, items, workers)
        return
    number, stop, rest = next(_numbers), mmap.mmap(-1, 1), iter(items)
    _tasks[number] = function, stop
    under_way: deque[Future[list[Result]]] = deque()
    pool = ProcessPoolExecutor(workers, get_context("fork"), _outlive_nobody)
    try:
        while group := list(islice(rest, TOGETHER)):
            under_way.append(pool.submit(_work, number, group))
            if len(under_way) * TOGETHER == workers * UNDER_WAY:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "A process that reads pictures was killed, perhaps for want of memory; start the same command again."
        ) from error
    finally:
        stop[0] = 1
        pool.shutdown(cancel_futures=True)
        del _tasks[number]


def shared_array(shape: tuple[int, ...]) -> np.ndarray:
    """Return zeros of uint8 in memory that processes forked from now on share."""
    size = prod(shape)
    return np.frombuffer(mmap.mmap(-1, max(1, size)), np.uint8, size).reshape(shape)


def _outlive_nobody() -> None:
    """Leave signals to the process that forked this one, and end with it, however that ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    gc.freeze()  # what was inherited is never freed here, least of all tensors of a GPU


def _work(task: int, group: list[Any]) -> list[Any]:
    """Work on the items of a group until nobody wants them any longer."""
    function, stop = _tasks[task]
    return [function(item) for item in group if not stop[0]]
