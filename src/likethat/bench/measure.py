"""Figures with their goals, and how times and memory are taken."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

SECONDS, MORE = 10.0, 4  # for which a comparison goes on after its rounds, up to so many times as many


@dataclass(frozen=True)
class Goal:
    limit: float
    at_least: bool = False  # instead of: at most
    unit: str = ""

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:g}{self.unit}"

    def met_by(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def next_to(self, value: float) -> str:
        return str(self) if self.met_by(value) else f"{self} MISSED"


def verdict(met: bool) -> str:
    return "all goals met" if met else "A GOAL WAS MISSED"


@dataclass(frozen=True)
class BenchFigure:
    """`value` is what the goal is about: the ratio of `ours` to `other`, or, where the goal is to be faster, the
    inverse; without another, `ours` itself."""

    case: str  # the backbone
    what: str
    against: str
    ours: float
    other: float | None
    unit: str
    value: float
    goal: Goal | None = None

    @property
    def met(self) -> bool:
        return self.goal is None or self.goal.met_by(self.value)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "goal": str(self.goal) if self.goal else None, "met": self.met}


def wait_for(device: torch.device) -> None:
    """Wait until all queued work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def timed(function: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Return the seconds that the function takes, all queued work included, and its result."""
    wait_for(device)
    started = time.perf_counter()
    result = function()
    wait_for(device)
    return time.perf_counter() - started, result


def in_turn(
    contenders: Sequence[Callable[[], object]], device: torch.device, rounds: int, seconds: float = SECONDS
) -> list[list[float]]:
    """Return the seconds of each contender in each round, after one round to warm up. Contenders take turns, so that
    whatever else the machine does meets all alike. Short rounds tell less each, so there are more of them, while the
    time lasts."""
    for contender in contenders:
        timed(contender, device)
    turns: list[list[float]] = []
    started = time.perf_counter()
    while len(turns) < rounds or (len(turns) < MORE * rounds and time.perf_counter() - started < seconds):
        turns.append([timed(contender, device)[0] for contender in contenders])
    return [list(column) for column in zip(*turns, strict=True)]


def compare_times(
    case: str,
    what: str,
    against: str,
    ours: Sequence[float],
    other: Sequence[float],
    goal: Goal | None = None,
    *,
    runs: int = 1,
) -> BenchFigure:
    """Compare medians over the rounds, of `runs` runs in each; the ratio is the median of the rounds' own."""
    ratios = [one / two for one, two in zip(ours, other, strict=True)]
    if goal is not None and goal.at_least:
        ratios = [1 / ratio for ratio in ratios]
    mine, theirs = (1000 * statistics.median(seconds) / runs for seconds in (ours, other))
    return BenchFigure(case, what, against, mine, theirs, "ms", statistics.median(ratios), goal)


def compare_peaks(case: str, what: str, against: str, ours: int | None, other: int | None) -> list[BenchFigure]:
    """Compare the peaks of memory; return no figure where the system does not tell."""
    if not ours or not other:
        return []
    return [BenchFigure(case, what, against, ours / 1e6, other / 1e6, "MB", ours / other)]


def with_peak(function: Callable[[], Result], device: torch.device) -> tuple[int | None, Result]:
    """Return the bytes needed above what was in use before (None where the system does not tell), and the result."""
    if device.type == "cuda":
        wait_for(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function()
        wait_for(device)
        return torch.cuda.max_memory_allocated(device) - before, result
    _give_back()
    marked = device.type == "cpu" and _forget_peak()
    resident = _process_memory("VmRSS")
    result = function()
    peak = _process_memory("VmHWM")
    if not marked or peak is None or resident is None:
        return None, result
    return max(0, peak - resident), result  # the system may have taken pages back in between


def _give_back() -> None:
    """Give freed memory back to the system where that is possible: it would be used again without being counted."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> bool:
    """Ask Linux to count the peak of this process anew; return whether it does."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _process_memory(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
