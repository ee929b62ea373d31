"""Progress for people: bars with time left on a terminal, plain lines elsewhere. All of it goes to stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[int, int], None]  # done so far, total
LINE_EVERY = 30.0  # seconds between plain lines of one task


def in_words(seconds: float) -> str:
    """Return a time as people say it: 40 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class Display:
    """One per command. `quiet` shows nothing at all."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.note = ""  # shown beside the progress of every task
        self.console = Console(stderr=True, quiet=quiet, highlight=False)

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def task(self, name: str) -> Iterator[Advance]:
        """Provide a function to call with (done, total)."""
        if self.quiet or not self.console.is_terminal:
            yield self._plain(name)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(name, total=None, note=self.note)
            yield lambda done, total: progress.update(task, completed=done, total=total, note=self.note)

    def _plain(self, name: str) -> Advance:
        started = last = time.monotonic()

        def advance(done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= LINE_EVERY and done < total:
                last = now
                left = (now - started) / max(done, 1) * (total - done)
                note = f"; {self.note}" if self.note else ""
                self.line(f"{name}: {done} of {total}, about {in_words(left)} left{note}")

        return advance
