"""Runs side by side, each in a process of its own; what is finished is not done again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from likethat.errors import Interrupted
from likethat.progress import Display
from likethat.runs import layout
from likethat.runs.atomic_files import read_json, write_json
from likethat.runs.layout import is_finished
from likethat.runtime import StopFlag
from likethat.workflows.reproduce.plan import Task

POLL = 0.2  # seconds
SAVE_EVERY = 10.0  # seconds between saves of the times
TIMES = "times.json"


@dataclass
class Times:
    """Wall time of every run and of the whole study, in seconds, over all attempts.

    `started` says since when (seconds since 1970) a process has been at a run. It is on disk from the first moment:
    when this process is killed, that one goes on and ends unobserved.
    """

    runs: dict[str, float] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    study: float = 0.0

    def end(self, name: str, when: float) -> None:
        """Note the end of a run, if a process is known to have been at it."""
        if name in self.started:
            self.runs[name] = self.runs.get(name, 0.0) + max(0.0, when - self.started.pop(name))

    def save(self, out: Path) -> None:
        write_json(out / TIMES, vars(self))


def load_times(out: Path) -> Times:
    return Times(**read_json(out / TIMES)) if (out / TIMES).is_file() else Times()


@dataclass
class Running:
    task: Task
    process: subprocess.Popen[bytes]
    log: IO[bytes]


def log_of(out: Path, task: Task) -> Path:
    """Return the log file beside the run folder, which belongs to the run."""
    return out / f"{task.name}.log"


def run_tasks(
    tasks: Sequence[Task],
    out: Path,
    jobs: int,
    times: Times,
    display: Display,
    stop: StopFlag,
    finished: Callable[[dict[str, str]], object],
) -> dict[str, str]:
    """Run what is not finished, `jobs` at a time; return a sentence for each run that failed.

    `finished` is called with those so far whenever a run ends. A failure stops only what is made from that run.
    """
    waiting = [task for task in tasks if not task.is_done(out)]
    for task in tasks:
        if task not in waiting:
            times.end(task.name, _last_sign(out, task))
    running: list[Running] = []
    failures: dict[str, str] = {}
    held: set[str] = set()
    with _clock(times, out) as tick:
        try:
            while waiting or running:
                stop.check()
                _give_up(waiting, failures)
                busy = {entry.task.name for entry in running}
                ready = [
                    task for task in waiting if all(is_finished(out / need) and need not in busy for need in task.needs)
                ]
                for task in ready[: max(0, jobs - len(running))]:
                    if started := _start(task, out, jobs, times, display):
                        running.append(started)
                    elif not task.is_done(out):
                        if task.name not in held:
                            display.line(f"{task.name}: waiting for the process that an earlier command left there")
                        held.add(task.name)
                        continue
                    waiting.remove(task)
                time.sleep(POLL)
                tick()
                for ended in [entry for entry in running if entry.process.poll() is not None]:
                    running.remove(ended)
                    ended.log.close()
                    times.end(ended.task.name, time.time())
                    _tell(ended, out, times, failures, display)
                    finished(failures)
        except (Interrupted, KeyboardInterrupt):
            _stop_all(running, times, display)
            raise
    return failures


def _start(task: Task, out: Path, jobs: int, times: Times, display: Display) -> Running | None:
    """Start the task; return None where it has finished, or a process of an earlier command still works on it."""
    run, path = out / task.name, log_of(out, task)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("ab")
    locked = _lock(log)
    if locked:
        times.end(task.name, _last_sign(out, task))
    if not locked or task.is_done(out):
        log.close()
        return None
    for half in run.parent.glob(f".{run.name}.*"):  # of a prune or combine that was killed
        shutil.rmtree(half, ignore_errors=True)
    environment = dict(os.environ)
    if jobs > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    command = [sys.executable, "-m", "likethat", *task.arguments]
    times.started[task.name] = time.time()
    times.save(out)
    # A session of its own: Ctrl-C reaches it through us alone, once, and it saves.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
    )
    display.line(f"{task.name} ...")
    return Running(task, process, log)


def _lock(log: IO[bytes]) -> bool:
    """Lock the log. The process writes through the same open file, so the lock lives as long as it does."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _last_sign(out: Path, task: Task) -> float:
    """Return when a process that ended unobserved was last heard of."""
    report, log = out / task.name / layout.REPORT, log_of(out, task)
    return (report if report.is_file() else log).stat().st_mtime


def _give_up(waiting: list[Task], failures: dict[str, str]) -> None:
    for task in list(waiting):
        if lost := [need for need in task.needs if need in failures]:
            waiting.remove(task)
            failures[task.name] = f"{lost[0]} failed, which it is made from."


def _tell(ended: Running, out: Path, times: Times, failures: dict[str, str], display: Display) -> None:
    name, code = ended.task.name, ended.process.returncode
    if code == 0 and ended.task.is_done(out):
        display.line(f"{name} done in {times.runs.get(name, 0.0):.0f} s")
        return
    failures[name] = f"{_last_words(log_of(out, ended.task), code)} (log: {log_of(out, ended.task)})"
    display.line(f"{name} failed: {failures[name]}")


def _last_words(log: Path, code: int) -> str:
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("likethat: ") if lines else f"it ended with exit code {code} and no word"


def _stop_all(running: Sequence[Running], times: Times, display: Display) -> None:
    for entry in running:
        with contextlib.suppress(ProcessLookupError):
            entry.process.terminate()
    if running:
        display.line(f"stopping; {len(running)} runs save what they have reached")
    for entry in running:
        entry.process.wait()
        entry.log.close()
        times.end(entry.task.name, time.time())


@contextlib.contextmanager
def _clock(times: Times, out: Path) -> Iterator[Callable[[], None]]:
    """Add the time between calls to the study's; save it now and then, so that a kill loses little."""
    last = saved = time.monotonic()

    def tick() -> None:
        nonlocal last, saved
        now = time.monotonic()
        passed, last = now - last, now
        times.study += passed
        if now - saved > SAVE_EVERY:
            saved = now
            times.save(out)

    try:
        yield tick
    finally:
        tick()
        times.save(out)
