"""The demonstration: embedded birds, embedded weights, the full recipe, and a page to look at."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from likethat.data.folder_kinds import is_begun, is_birds, is_run
from likethat.data.synthetic.field_guide import make_birds
from likethat.errors import UserError
from likethat.explaining.verify import Verification
from likethat.progress import Display
from likethat.runs.atomic_files import check_no_history
from likethat.runs.classifier import Classifier
from likethat.workflows.train import train
from likethat.workflows.verify import verify_run

SPECIES = 8
# Small pictures and few passes, so that two CPU cores are enough, in many small steps, which ask no teacher. As many
# prototypes of a class as these birds have parts that are found well; one shows what tells it from the species next to
# it. Everything else is the default preset.
OPTIONS: dict[str, Any] = {
    "input_size": (160, 160),
    "shift": 7,
    "batch_size": 8,
    "baseline_epochs": 5,
    "joint_epochs": (9, 2),
    "prototypes_per_class": 3,
    "decisive_parts": True,
    "exclusive": True,
    "distillation": 0.0,
    "context": 2.4,
    "place": 1.2,
}


def run_demo(out: Path, *, device: str, overwrite: bool, display: Display) -> tuple[Classifier, Verification]:
    """Draw the data under OUT/birds and train the run under OUT/run."""
    birds, run = out / "birds", out / "run"
    for folder, is_earlier in ((birds, is_birds(birds)), (run, is_run(run) or is_begun(run))):
        if folder.exists() and not (overwrite and is_earlier):
            remedy = "choose another --out" if overwrite else "pass --overwrite to replace it, or choose another --out"
            raise UserError(f"{folder} is there already{'' if is_earlier else ' and not of a demo'}; {remedy}.")
        check_no_history(folder)
    shutil.rmtree(birds, ignore_errors=True)
    shutil.rmtree(run, ignore_errors=True)
    display.line(f"1/3 drawing birds of {SPECIES} species into {birds}")
    with display.task("drawing birds") as advance:
        make_birds(birds, species=SPECIES, progress=advance)
    display.line(f"2/3 training on them, run folder {run}")
    classifier = train(birds, run, device=device, display=display, **OPTIONS)
    display.line("3/3 verifying that every prototype is the training patch it names")
    return classifier, verify_run(classifier, None, display)
