"""The runs of a study, forked off a process that has torch loaded already, which takes longer than a tiny run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, Any

import torch

from likethat.cli.parser import main
from likethat.workflows.reproduce import schedule

MOST_FILES = 4096  # that a process has open


class ForkedCommand:
    """A `python -m likethat ...` as `subprocess.Popen` starts it: a process with a session, an environment and signal
    handlers of its own, and none of its parent's files but those given."""

    def __init__(self, command: Sequence[str], *, stdout: IO[bytes], env: Mapping[str, str], **_: Any) -> None:
        assert list(command[:3]) == [sys.executable, "-m", "likethat"]
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self._become(stdout, env)
                code = main(list(command[3:]))
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def _become(self, log: IO[bytes], environment: Mapping[str, str]) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        os.closerange(3, MOST_FILES)
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(1)  # makes torch's own pool anew, which two threads that begin at once would do in a race

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self) -> int | None:
        return self._look(0)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class _Forking:
    """What the schedule takes for `subprocess`."""

    Popen, DEVNULL = ForkedCommand, subprocess.DEVNULL


def fork_runs() -> None:
    """Let a study in this process fork its runs, instead of starting Python for each."""
    schedule.subprocess = _Forking  # type: ignore[assignment]
