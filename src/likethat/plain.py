"""A finished baseline run, loaded: the plain classifier and its classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from likethat import run_dir
from likethat.errors import UserError
from likethat.models.backbone import create_backbone, load_state, place, read_state
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


def read_classifier(plain: PlainClassifier, source: Path, record: run_dir.RunRecord) -> None:
    """Fills `plain` from a baseline run on the same images, or from a file of a timm classifier of these classes."""
    if source.is_dir():
        _check_baseline(source, record)
        run_dir.load_weights(source, plain, "baseline")
        return
    state, net = read_state(source), plain.backbone.net
    load_state(net, state, plain.backbone.name, str(source))
    head = net.pretrained_cfg["classifier"]
    weight_KC, bias_K = state.get(f"{head}.weight"), state.get(f"{head}.bias")
    if weight_KC is None or bias_K is None or weight_KC.shape != plain.head.weight.shape:
        classes, channels = plain.head.weight.shape
        raise UserError(
            f"{source} holds no linear layer from {channels} channels to these {classes} classes ({head}.weight and "
            f"{head}.bias); save timm's {plain.backbone.name} as it was fine-tuned on them, or train one with "
            "`likethat baseline`."
        )
    with torch.no_grad():
        plain.head.weight.copy_(weight_KC)
        plain.head.bias.copy_(bias_K)


def _check_baseline(run: Path, record: run_dir.RunRecord) -> None:
    """What held-out images are for is lost when the classifier has seen them."""
    found = run_dir.read_record(run)
    if found.kind != run_dir.BASELINE:
        raise UserError(f"{run} is no baseline; name a run folder that `likethat baseline` made, or a file of weights.")
    asked = record.config.model
    if (found.config.model.backbone, found.config.model.input_size) != (asked.backbone, asked.input_size):
        name, (height, width) = found.config.model.backbone, found.config.model.input_size
        raise UserError(
            f"The classifier in {run} is a {name} for {height}x{width} pictures; pass --backbone {name} "
            f"--input-size {height}x{width}."
        )
    if found.data.fingerprint != record.data.fingerprint:
        raise UserError(
            f"The classifier in {run} was trained on other images or another split of them; use the data, the --seed "
            f"({found.config.train.seed}) and the data options that it was trained with."
        )
