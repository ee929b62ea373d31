"""Threads and processes give what a loop gives, in order, and stop when nobody asks for more."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from likethat.data.reading import workers
from likethat.data.reading.workers import begin_many, map_in_threads, map_many, shared_array
from likethat.errors import UserError

forked = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


def in_processes(function: Callable[[int], Any], items: Iterable[int], count: int = 3) -> Iterator[Any]:
    return map_many(function, items, workers.MANY, count)


@pytest.mark.parametrize(("mapped", "most"), [(map_in_threads, 24), (in_processes, 3 * workers.UNDER_WAY)])
def test_work_under_way_is_bounded_and_in_order(mapped: Callable[..., Iterator[int]], most: int) -> None:
    drawn = []

    def items() -> Iterator[int]:
        for item in range(2000):
            drawn.append(item)
            yield item

    for index, result in enumerate(mapped(lambda item: -item, items(), 3)):
        assert result == -index
        assert len(drawn) - index <= most
    assert index == 1999


def test_work_runs_on_several_threads_and_passes_errors_on() -> None:
    meeting = threading.Barrier(3, timeout=20)  # opens only when three workers are there at once
    assert len(list(map_in_threads(lambda _: meeting.wait(), range(3), 3))) == 3
    with pytest.raises(ZeroDivisionError):
        list(map_in_threads(lambda item: 1 // item, [1, 2, 0, 3], 2))


@forked
def test_many_items_go_to_other_processes_and_few_do_not() -> None:
    assert os.getpid() not in set(in_processes(lambda _: os.getpid(), range(100)))
    assert set(map_many(lambda _: os.getpid(), range(100), 100)) == {os.getpid()}


@forked
@pytest.mark.parametrize(("items", "most"), [(workers.MANY_LONG, workers.PROCESSES), (2000, 15)])
def test_long_work_goes_to_as_many_processes_as_are_worth_their_start(
    monkeypatch: pytest.MonkeyPatch, items: int, most: int
) -> None:
    monkeypatch.setattr(workers, "usable_processors", lambda: 64)

    def work(_: int) -> int:
        time.sleep(0.002)
        return os.getpid()

    with begin_many(work, range(items)) as found:
        assert most / 2 < len(set(found) - {os.getpid()}) <= most


@forked
def test_processes_pass_errors_on() -> None:
    with pytest.raises(ZeroDivisionError):
        list(in_processes(lambda item: 1 // item, [1, 2, 0, 3]))
    with pytest.raises(UserError, match="mend it"):
        list(in_processes(partial(_refuse, 70), range(100)))


def _refuse(wrong: int, item: int) -> None:
    if item == wrong:
        raise UserError("mend it")


@forked
def test_processes_write_into_shared_memory() -> None:
    written_N = shared_array((100,))

    def write(item: int) -> None:
        written_N[item] = item + 1

    list(in_processes(write, range(100)))
    assert written_N.tolist() == list(range(1, 101))
    assert shared_array((0, 4, 4, 3)).shape == (0, 4, 4, 3)


@forked
def test_signals_are_left_to_who_asked() -> None:
    def work(item: int) -> int:
        os.kill(os.getpid(), signal.SIGINT if item % 2 else signal.SIGTERM)
        return item

    assert list(in_processes(work, range(50))) == list(range(50))


@forked
def test_a_killed_process_is_told_in_a_sentence() -> None:
    with pytest.raises(UserError, match="A process that reads pictures was killed"):
        list(in_processes(lambda _: os.kill(os.getpid(), signal.SIGKILL), range(50)))


@forked
def test_nobody_works_on_when_nobody_asks() -> None:
    done_N = shared_array((2000,))

    def work(item: int) -> int:
        time.sleep(0.03)
        done_N[item] = 1
        return item

    with closing(in_processes(work, range(2000), 2)) as found:
        assert next(found) == 0
    assert done_N.sum() < 4 * workers.TOGETHER  # which were asked for


@pytest.fixture(params=["threads", pytest.param("processes", marks=forked)])
def _worked_on_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MANY_LONG", 1 if request.param == "processes" else 10**9)


@pytest.mark.usefixtures("_worked_on_by")
def test_work_is_begun_before_anybody_asks_for_it() -> None:
    done_N = shared_array((50,))

    def work(item: int) -> int:
        done_N[item] = 1
        return -item

    with begin_many(work, range(50)) as found:
        deadline = time.monotonic() + 30
        while not done_N.all():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert list(found) == [-item for item in range(50)]
    with begin_many(work, []) as found:
        assert list(found) == []


@pytest.mark.usefixtures("_worked_on_by")
def test_begun_work_ends_with_the_block_and_passes_errors_on() -> None:
    done_N = shared_array((2000,))

    def work(item: int) -> None:
        time.sleep(0.03)
        done_N[item] = 1

    with pytest.raises(KeyError), begin_many(work, range(2000)):
        raise KeyError
    assert done_N.sum() < 2000 / 4
    with pytest.raises(UserError, match="mend it"), begin_many(partial(_refuse, 70), range(100)) as found:
        list(found)


@forked
def test_a_killed_process_ends_begun_work_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MANY_LONG", 1)
    with (
        pytest.raises(UserError, match="A process that reads pictures was killed"),
        begin_many(lambda _: os.kill(os.getpid(), signal.SIGKILL), range(50)) as found,
    ):
        list(found)
