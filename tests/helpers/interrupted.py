"""Runs that get a signal at a known place or find the disk full, and what a finished run is compared by."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from helpers.runs import likethat

from likethat.runs import atomic_files
from likethat.training import loop, stages, state
from likethat.workflows import run_conclusion

# What a stage that is no epoch calls to do its work.
CALLS = {
    "choose": (stages, "start_from_baseline"),
    "project": (stages, "project"),
    "last_layer": (stages, "solve_last_layer"),
    "save": (atomic_files.os, "fsync"),
    "report": (run_conclusion, "write_report"),
}


def signalled(
    train: list[str],
    stage: str,
    count: int,
    save_every: float = 1000,
    number: int = signal.SIGKILL,
    worth_saving: float = 0,
) -> subprocess.CompletedProcess[str]:
    """The command, which gets the signal when a stage does its work for the `count`-th time: always at that place."""
    return likethat(*train, check=None, before=partial(_prepare, stage, count, save_every, number, worth_saving))


def _prepare(stage: str, count: int, save_every: float, number: int, worth_saving: float) -> None:
    """In the command's own process; a step is counted where its learning rates are set, captured or not."""
    state.SAVE_EVERY, state.WORTH_SAVING = save_every, worth_saving
    if stage in CALLS:
        _signal_at(*CALLS[stage], count, number, lambda *_: True)
    else:
        _signal_at(loop, "set_learning_rates", count, number, lambda _, entry, *rest: entry.stage == stage)


def _signal_at(module: Any, name: str, count: int, number: int, wanted: Callable[..., bool]) -> None:
    function, calls = getattr(module, name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += wanted(*args)
        if calls == count:
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    setattr(module, name, call)


def limit_files(size: int) -> None:
    """Let no file of this process become larger, as on a full disk."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def contents(run: Path) -> dict[str, str]:
    """Everything that must be equal to the bit; metrics without the seconds they took."""
    found = {
        name: hashlib.sha256((run / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "prototypes.json", "config.json")
    }
    for picture in sorted((run / "prototypes").iterdir()):
        found[picture.name] = hashlib.sha256(picture.read_bytes()).hexdigest()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds", None)
    found["metrics"] = json.dumps(lines, sort_keys=True)
    return found
