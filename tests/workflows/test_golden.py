"""A refactoring changes no bit of a loss: two small runs as they were when golden.json was written.

After a change that is meant to change training: PYTHONPATH=tests python tests/workflows/test_golden.py
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import runs
from helpers.runs import DEFAULT, PAPER, likethat, make_tiny_birds

GOLDEN = Path(__file__).with_name("golden.json")
RUNS = {"default": DEFAULT, "paper": PAPER}


def machine() -> dict[str, str]:
    """What decides on the last bit: the same sums are taken in another order elsewhere, and other versions draw, store
    and shrink the birds otherwise."""
    cpus = Path("/proc/cpuinfo")
    first = cpus.read_text().partition("\n\n")[0] if cpus.is_file() else platform.processor()
    told = ("vendor_id", "cpu family", "model", "stepping", "cache size", "flags")
    facts = [" ".join(line.split()) for line in first.splitlines() if line.startswith(told)] or [first]
    return {
        "torch": torch.__version__,
        **{name: version(name) for name in ("torchvision", "timm", "numpy", "scipy", "pillow")},
        "libc": " ".join(platform.libc_ver()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cpu": hashlib.sha256("\n".join(facts).encode()).hexdigest(),
    }


def losses(options: list[str], folder: Path) -> list[dict[str, Any]]:
    """By stage, in order; floats are written so that reading them gives the same bits."""
    likethat("train", make_tiny_birds(folder / "birds"), "--out", folder / "run", *options)
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    losses_of_epochs = [
        {"stage": record["stage"], "value": record["train"]["loss"]}
        for record in records
        if "loss" in record.get("train", {})
    ]
    objectives = [
        {"stage": record["stage"], "value": record["objective"]} for record in records if "objective" in record
    ]
    return losses_of_epochs + objectives


@pytest.mark.parametrize("name", RUNS)
def test_losses_have_the_same_bits(name: str, tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    ours, theirs = losses(RUNS[name], tmp_path), golden[name]
    assert [record["stage"] for record in ours] == [record["stage"] for record in theirs]
    if machine() == golden["machine"]:
        assert ours == theirs
    else:  # before rounding has had the time to grow
        assert ours[0]["value"] == pytest.approx(theirs[0]["value"], rel=1e-3)


if __name__ == "__main__":
    written: dict[str, Any] = {"machine": machine()}
    for run, its_options in RUNS.items():
        with tempfile.TemporaryDirectory() as scratch:
            runs.made_once_in = Path(scratch)
            written[run] = losses(its_options, Path(scratch))
    GOLDEN.write_text(json.dumps(written, indent=1) + "\n")
