"""Commands on a GPU: pictures that do not fit there, torchrun, and memory that runs out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.gpu import DEFAULT_ON_GPU, ON_GPU, check_same_end, make_birds_for_gpu
from helpers.runs import likethat

from likethat import UserError, train
from likethat.data import loaders

pytestmark = ON_GPU


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_birds_for_gpu(tmp_path_factory.mktemp("birds") / "data")


@pytest.fixture(scope="module")
def held(birds: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs with all pictures on the device."""
    runs = [tmp_path_factory.mktemp("held") / "run" for _ in range(2)]
    for run in runs:
        likethat("train", birds, "--out", run, *DEFAULT_ON_GPU)
    return runs


def hold_nothing() -> None:
    loaders.GPU_SHARE = 0.0


def test_pictures_that_do_not_fit_are_sent_batch_by_batch(birds: Path, held: list[Path], tmp_path: Path) -> None:
    likethat("train", birds, "--out", tmp_path / "run", *DEFAULT_ON_GPU, before=hold_nothing)
    check_same_end(tmp_path / "run", *held)


def test_torchrun_with_one_gpu_is_a_run(birds: Path, held: list[Path], tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [*launcher, "-m", "likethat", "train", str(birds), "--out", str(tmp_path / "run"), *DEFAULT_ON_GPU]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    check_same_end(tmp_path / "run", *held)


def leave_little_memory() -> None:
    torch.cuda.set_per_process_memory_fraction(300e6 / torch.cuda.get_device_properties(0).total_memory)


LARGE = {"backbone": "resnet34", "weights": "none", "input_size": "224", "batch_size": "36"}


def test_memory_that_runs_out_is_told_in_a_sentence(birds: Path, tmp_path: Path) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in LARGE.items()]
    command = ["train", birds, "--out", tmp_path / "run", "--device", "cuda", *options]
    done = likethat(*command, check=2, before=leave_little_memory)
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("likethat: ")
    assert "memory" in last
    assert "--batch-size" in last
    assert "--input-size" in last


def test_memory_that_runs_out_is_a_users_error_in_python(birds: Path, tmp_path: Path) -> None:
    leave_little_memory()
    try:
        with pytest.raises(UserError, match="--batch-size or --input-size"):
            train(birds, tmp_path / "run", device="cuda", **LARGE)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
