"""Small data sets and runs for tests that go through the command line."""

from __future__ import annotations

import atexit
import hashlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from filelock import FileLock

from likethat.cli.parser import main
from likethat.data.synthetic.field_guide import make_birds
from likethat.runs import layout
from likethat.runs.atomic_files import read_json, write_json
from likethat.runs.manifest import write_manifest

made_once_in: Path | None = None  # a folder of all processes of a test session; conftest.py says which

_LOADED = multiprocessing.get_context("forkserver")
_LOADED.set_forkserver_preload(["likethat.workflows.train"])

# A whole run in a few seconds: timm's smallest ResNet from random weights.
TINY = """--backbone test_resnet --weights none --latent-width 16 --input-size 64 --batch-size 8 --device cpu
    --prototypes-per-class 3""".split()
DEFAULT = [*TINY, *"--baseline-epochs 2 --joint-epochs 2,1".split()]
QUICK = [*TINY, "--preset", "quick"]
PAPER = [*TINY, *"--preset paper --views 2 --last-layer-views 1 --warm-epochs 1 --joint-epochs 1,1".split()]


def make_tiny_birds(folder: Path, seed: int = 0) -> Path:
    """Make the birds at this place, copied from where they were drawn first."""
    draw = partial(make_birds, species=3, train=6, val=3, test=3, size=64, seed=seed)
    shutil.copytree(made_once(f"birds{seed}", draw), folder)
    return folder


def make_tiny_run(folder: Path, options: list[str] = DEFAULT) -> Path:
    """Make `birds` and a finished `run` in this folder, the files being those that training leaves at this place. It is
    trained once for all tests that want such a run and do not ask how it came about."""

    def train(place: Path) -> None:
        likethat("train", make_tiny_birds(place / "birds"), "--out", place / "run", *options)

    shutil.copytree(made_once(hashlib.sha256(repr(options).encode()).hexdigest(), train), folder, dirs_exist_ok=True)
    run = folder / "run"
    document = read_json(run / layout.CONFIG)
    document["data"]["root"] = str(folder / "birds")
    write_json(run / layout.CONFIG, document)
    write_manifest(run)
    return run


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that the first process of this test session to want it has made. It is copied, never changed."""
    assert made_once_in is not None
    folder = made_once_in / name
    with FileLock(made_once_in / f"{name}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=made_once_in) as scratch:
                make(Path(scratch, name))
                Path(scratch, name).rename(folder)
    return folder


def likethat(
    *arguments: object, check: int | None = 0, before: Callable[[], object] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the real command in a process of its own; `check` is the exit code it must have, `before` is called first.

    The process is forked off one that has loaded torch already, which takes longer than most of these commands.
    """
    command = list(map(str, arguments))
    (done,) = in_processes(partial(_command, command, before), {})
    done.args = command
    assert check is None or done.returncode == check, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def in_processes(work: Callable[[], int], *more: Mapping[str, str]) -> list[subprocess.CompletedProcess[str]]:
    """Do the work in several processes at a time, each with more variables in its environment; `work` returns their
    exit code."""
    with tempfile.TemporaryDirectory() as folder:
        files = [[str(Path(folder, f"{name}{number}")) for name in ("out", "err")] for number in range(len(more))]
        processes = [_forked(work, *each) for each in zip(files, more, strict=True)]
        for process in processes:
            process.join()
        said = [[Path(file).read_text(encoding="utf-8") for file in pair] for pair in files]
    codes = [process.exitcode or 0 for process in processes]
    return [subprocess.CompletedProcess([], code, *pair) for code, pair in zip(codes, said, strict=True)]


def forked_command(command: list[str], files: list[str], before: Callable[[], object] | None) -> BaseProcess:
    """Begin a command whose stdout and stderr go to these files."""
    return _forked(partial(_command, command, before), files, {})


def _command(command: list[str], before: Callable[[], object] | None) -> int:
    if before is not None:
        before()
    return main(command)


def _forked(work: Callable[[], int], files: list[str], more: Mapping[str, str]) -> BaseProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    process = _LOADED.Process(target=_become, args=(work, files, environment, os.getcwd()))
    process.start()
    return process


def _become(work: Callable[[], int], files: list[str], environment: dict[str, str], folder: str) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)  # loaded before the environment was this one
    try:
        sys.exit(work())
    finally:
        atexit._run_exitfuncs()
