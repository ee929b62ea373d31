"""Long work that a person starts and watches: how far it is, and what went wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from likethat.errors import Interrupted, UserError
from likethat.progress import Advance, Display

CLOSED, WORKING, DONE, FAILED = "closed", "working", "done", "failed"


class Watched(Display):
    """Progress that a page asks for. Once it is stopped, the work ends at its next step."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.now: dict[str, Any] = {"task": "opening", "done": 0, "total": 0}
        self.stopped = False

    @contextmanager
    def task(self, name: str) -> Iterator[Advance]:
        self.now = {"task": name, "done": 0, "total": 0}

        def advance(done: int, total: int) -> None:
            if self.stopped:
                raise Interrupted
            self.now = {"task": name, "done": done, "total": total}

        yield advance


class Work:
    def __init__(self) -> None:
        self.state, self.problem, self.display = CLOSED, "", Watched()

    def start(self, thread: ThreadPoolExecutor, function: Callable[[Display], None]) -> None:
        """Start the work, unless it has started; work that failed may be tried again."""
        if self.state in (CLOSED, FAILED):
            self.state = WORKING
            thread.submit(self._run, function)

    def _run(self, function: Callable[[Display], None]) -> None:
        try:
            function(self.display)
            self.state = DONE
        except UserError as error:
            self.problem, self.state = str(error), FAILED
        except Interrupted:
            self.state = CLOSED
        except Exception:
            logging.getLogger(__name__).exception("work that a page started")
            self.problem, self.state = "The server made a mistake; its log says which.", FAILED

    def stop(self) -> None:
        self.display.stopped = True

    def to_dict(self) -> dict[str, Any]:
        return {"state": self.state, "problem": self.problem, "progress": self.display.now}
