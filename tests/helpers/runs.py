"""Small data sets and runs for tests that go through the command line."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from likethat.cli.parser import main
from likethat.data.synthetic.field_guide import make_birds

_LOADED = multiprocessing.get_context("forkserver")
_LOADED.set_forkserver_preload(["likethat.workflows.train"])

# A whole run in a few seconds: timm's smallest ResNet from random weights.
TINY = """--backbone test_resnet --weights none --latent-width 16 --input-size 64 --batch-size 8 --device cpu
    --prototypes-per-class 3""".split()
DEFAULT = [*TINY, *"--baseline-epochs 2 --joint-epochs 2,1".split()]
PAPER = [*TINY, *"--preset paper --views 2 --last-layer-views 1 --warm-epochs 1 --joint-epochs 1,1".split()]


def make_tiny_birds(folder: Path, seed: int = 0) -> Path:
    make_birds(folder, species=3, train=6, val=3, test=3, size=64, seed=seed)
    return folder


def likethat(
    *arguments: object, check: int | None = 0, before: Callable[[], object] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the real command in a process of its own; `check` is the exit code it must have, `before` is called first.

    The process is forked off one that has loaded torch already, which takes longer than most of these commands.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("stdout", "stderr")]
        process = forked_command(list(map(str, arguments)), files, before)
        process.join()
        done = subprocess.CompletedProcess(
            list(map(str, arguments)),
            process.exitcode or 0,
            *(Path(file).read_text(encoding="utf-8") for file in files),
        )
    assert check is None or done.returncode == check, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def forked_command(command: list[str], files: list[str], before: Callable[[], object] | None) -> BaseProcess:
    """Begin a command whose stdout and stderr go to these files."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = _LOADED.Process(target=_command, args=(command, files, environment, os.getcwd(), before))
    process.start()
    return process


def _command(
    arguments: list[str],
    files: list[str],
    environment: dict[str, str],
    folder: str,
    before: Callable[[], object] | None,
) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)  # loaded before the environment was this one
    if before is not None:
        before()
    try:
        sys.exit(main(arguments))
    finally:
        atexit._run_exitfuncs()
