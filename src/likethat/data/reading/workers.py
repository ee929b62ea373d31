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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
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
FEW, MANY_LONG = 4, 256  # the same of items that take long each
LONG_EACH = 128  # of those that make one more process worth its start, which takes as long as several of them
PROCESSES = 8  # that work on them in any case, on as many processors
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
    rest, under_way = iter(items), deque[Future[list[Result]]]()
    with _at_work(function, workers, by_processes=True) as submit:
        while group := list(islice(rest, TOGETHER)):
            under_way.append(submit(group))
            if len(under_way) * TOGETHER == workers * UNDER_WAY:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()


@contextmanager
def begin_many(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Iterator[Result]]:
    """Begin to work on all items, each of which takes long, and provide the results in order: the block may do other
    things before it asks for them. Who works, and what they must not do, is as with `map_many`; after the block nobody
    works on."""
    by_processes, workers = len(items) >= MANY_LONG and sys.platform == "linux", usable_processors()
    if by_processes:
        workers = min(workers, max(PROCESSES, len(items) // LONG_EACH))
    with _at_work(function, workers, by_processes=by_processes) as submit:
        under_way = [submit(items[start : start + FEW]) for start in range(0, len(items), FEW)]
        yield (result for future in under_way for result in future.result())


@contextmanager
def _at_work(
    function: Callable[[Item], Result], workers: int, *, by_processes: bool
) -> Iterator[Callable[[Sequence[Item]], Future[list[Result]]]]:
    """Provide what gives a group of items to threads, or to processes that are forked when the first is given."""
    number, stop = next(_numbers), mmap.mmap(-1, 1)
    _tasks[number] = function, stop
    pool: Executor = ThreadPoolExecutor(workers)
    if by_processes:
        pool = ProcessPoolExecutor(workers, get_context("fork"), _outlive_nobody)
    to_do: set[Future[list[Result]]] = set()  # none of those that are done, whose results are somebody else's

    def submit(group: Sequence[Item]) -> Future[list[Result]]:
        future = pool.submit(_work, number, group)
        to_do.add(future)
        future.add_done_callback(to_do.discard)
        return future

    try:
        yield submit
    except BrokenProcessPool as error:
        raise UserError(
            "A process that reads pictures was killed, perhaps for want of memory; start the same command again."
        ) from error
    finally:
        stop[0] = 1
        # Large processes take a second to end: once all is done, nobody waits for that.
        pool.shutdown(wait=bool(to_do), cancel_futures=True)
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


def _work(task: int, group: Sequence[Any]) -> list[Any]:
    """Work on the items of a group until nobody wants them any longer."""
    function, stop = _tasks[task]
    return [function(item) for item in group if not stop[0]]
