"""Small data sets and runs for tests that go through the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from likethat.data.synth import make_birds

# A whole run in a few seconds: timm's smallest ResNet from random weights.
TINY = """--backbone test_resnet --weights none --latent-width 16 --input-size 64 --batch-size 8 --device cpu
    --prototypes-per-class 3""".split()
DEFAULT = [*TINY, *"--classifier-epochs 2 --joint-epochs 2,1".split()]
PAPER = [*TINY, *"--preset paper --views 2 --last-layer-views 1 --warm-epochs 1 --joint-epochs 1,1".split()]


def make_tiny_birds(folder: Path, seed: int = 0) -> Path:
    make_birds(folder, species=3, train=6, val=3, test=3, size=64, seed=seed)
    return folder


def likethat(*arguments: object, check: int | None = 0) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own; `check` is the exit code it must have."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "likethat", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert check is None or done.returncode == check, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
