"""A finished baseline run, loaded: the plain classifier and its classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from likethat import run_dir
from likethat.errors import UserError
from likethat.models.backbone import create_backbone, place
from likethat.models.baseline import PlainClassifier
from likethat.runtime import exact_arithmetic, resolve_device


@dataclass(frozen=True)
class PlainRun:
    path: Path
    classes: tuple[str, ...]
    model: PlainClassifier
    device: torch.device


def load_plain(run: str | Path, device: str = "auto") -> PlainRun:
    """The model of a run folder that `likethat baseline` made."""
    run = Path(run)
    record = run_dir.read_record(run)
    if record.kind != run_dir.BASELINE:
        raise UserError(f"{run} is no baseline; name a run folder that `likethat baseline` made.")
    exact_arithmetic()
    settings = record.config.model
    backbone = create_backbone(settings.backbone, "none", settings.input_size)
    model = PlainClassifier(backbone, len(record.data.classes))
    run_dir.load_weights(run, model, "baseline")
    torch_device = resolve_device(device)
    return PlainRun(run, record.data.classes, place(model, torch_device).eval(), torch_device)
