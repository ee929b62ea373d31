"""What the tests on a GPU share: their mark, and small runs there."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from helpers.interrupted import contents
from helpers.runs import DEFAULT, PAPER

from likethat.data.synthetic.field_guide import make_birds
from likethat.runs import layout

CUDA = torch.device("cuda", 0)
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; `make test-gpu` runs it where one is"),
]

DEFAULT_ON_GPU = [*DEFAULT, "--device", "cuda"]
PAPER_ON_GPU = [*PAPER, "--device", "cuda"]
# A network as people train it, BatchNorm's statistics included.
RESNET18_ON_GPU = [
    *DEFAULT_ON_GPU,
    *"--backbone resnet18 --latent-width 64 --baseline-epochs 1 --joint-epochs 2 --batch-norm-images 10".split(),
]


def make_birds_for_gpu(folder: Path) -> Path:
    """Five steps an epoch: enough that some of each stage are replayed from the capture."""
    make_birds(folder, species=3, train=12, val=3, test=4, size=64, seed=0)
    return folder


def check_same_end(run: Path, expected: Path, again: Path) -> None:
    """A run ends as expected: to the bit, if two runs that nobody disturbed do, and else with the same figures."""
    if contents(expected) == contents(again):
        assert contents(run) == contents(expected)
        return
    warnings.warn("kernels do not repeat themselves to the bit here, so figures are compared", stacklevel=2)
    assert losses(run) == [(stage, pytest.approx(value, rel=0.05, abs=0.02)) for stage, value in losses(expected)]


def losses(run: Path) -> list[tuple[str, float]]:
    """Of every epoch its loss, of every last layer its objective."""
    return [
        (record["stage"], record["objective"] if "objective" in record else record["train"]["loss"])
        for record in map(json.loads, (run / layout.METRICS).read_text().splitlines())
        if "objective" in record or "loss" in record.get("train", {})
    ]
