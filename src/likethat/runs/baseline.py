"""A finished baseline run, loaded, and baselines that training starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from likethat.config.settings import ModelConfig
from likethat.data.folder_kinds import is_run
from likethat.errors import UserError
from likethat.models.backbone import configured_backbone, create_timm, describe_file, load_state, place, read_state
from likethat.models.baseline import BaselineClassifier
from likethat.models.fine_map import refine_map
from likethat.progress import Display
from likethat.runs import layout
from likethat.runtime import exact_arithmetic, resolve_device
from likethat.windows import NO_WINDOWS


@dataclass(frozen=True)
class LoadedBaseline:
    path: Path
    classes: tuple[str, ...]
    model: BaselineClassifier
    device: torch.device


def load_baseline(run: str | Path, device: str = "auto") -> LoadedBaseline:
    """Load the model of a run folder that `likethat baseline` made."""
    run = Path(run)
    record = layout.read_record(run)
    if record.kind != layout.BASELINE:
        raise UserError(f"{run} is no baseline; name a run folder that `likethat baseline` made.")
    exact_arithmetic()
    backbone = configured_backbone(record.config.model, "none")
    model = BaselineClassifier(backbone, len(record.data.classes))
    layout.load_weights(run, model, "baseline")
    torch_device = resolve_device(device)
    return LoadedBaseline(run, record.data.classes, place(model, torch_device).eval(), torch_device)


def read_baseline(baseline: BaselineClassifier, source: Path, record: layout.RunRecord) -> None:
    """Fill `baseline` from a baseline run on the same images, or from a file of a timm classifier of these classes."""
    if run := _run_of(source):
        _check_images(run, record)
        layout.load_weights(run, baseline, "baseline")
        baseline.backbone.began_with = f"baseline {run.name}: {describe_file(run / layout.MODEL)}"
    else:
        _read_timm(baseline, source)
        baseline.backbone.began_with = describe_file(source)


def check_baseline(source: Path, asked: ModelConfig, display: Display) -> None:
    """Check what can be told about the baseline before images are decoded."""
    if not source.exists():
        raise UserError(
            f"The baseline {source} does not exist; name a baseline run or a file of a timm model's weights."
        )
    if run := _run_of(source):
        _check_network(run, asked)
    else:
        display.line(
            f"Nothing tells which images {source} was trained on: if validation images are among them, validation "
            "accuracy and prediction sets will promise too much."
        )


def _run_of(source: Path) -> Path | None:
    """Return the run folder, if it is one or the file of weights in one."""
    if source.is_dir():
        return source
    return source.parent if source.name == layout.MODEL and is_run(source.parent) else None


def _read_timm(baseline: BaselineClassifier, source: Path) -> None:
    """Read a timm model whose linear layer works on the mean of the map, as ours does: else patches say nothing."""
    state, backbone = read_state(source), baseline.backbone
    load_state(backbone.net, state, backbone.name, str(source))
    head, (classes, channels) = backbone.net.pretrained_cfg["classifier"], baseline.head.weight.shape
    weight_KC, bias_K = state.get(f"{head}.weight"), state.get(f"{head}.bias")
    if weight_KC is None or bias_K is None or weight_KC.shape != baseline.head.weight.shape:
        raise UserError(
            f"{source} holds no linear layer from the {channels} channels of {backbone.name}'s map to these {classes} "
            "classes; take a timm classifier that was fine-tuned on them and has one, or train one with `likethat "
            "baseline`."
        )
    with torch.no_grad():
        baseline.head.weight.copy_(weight_KC)
        baseline.head.bias.copy_(bias_K)
    whole = create_timm(backbone.name, backbone.net_size, num_classes=classes)
    if backbone.fine_map:
        refine_map(whole, backbone.net_size)
    whole = whole.to(backbone.mean.device).eval()
    load_state(whole, state, backbone.name, str(source))
    training = baseline.training
    baseline.eval()
    with torch.no_grad():
        x_B3HW = torch.rand(2, 3, *backbone.net_size, generator=torch.Generator().manual_seed(0)).to(backbone.mean)
        ours_BK = baseline.head(backbone.features(x_B3HW).mean((2, 3)))
        theirs_BK = whole((x_B3HW - backbone.mean) / backbone.std)
    baseline.train(training)
    if not torch.allclose(ours_BK, theirs_BK, rtol=0, atol=1e-3 * float(theirs_BK.abs().max())):
        raise UserError(
            f"timm's {backbone.name} does not average its map before the linear layer and nothing else (it has a class "
            "token or another norm there), so patches cannot be read off it; train a baseline with `likethat "
            "baseline`."
        )


def _check_network(run: Path, asked: ModelConfig) -> None:
    found = layout.read_record(run) if is_run(run) else None
    if found is None or found.kind != layout.BASELINE:
        raise UserError(f"{run} is no baseline; name a run folder that `likethat baseline` made, or a file of weights.")
    has, (height, width) = found.config.model, found.config.model.input_size
    if (has.backbone, has.input_size) != (asked.backbone, asked.input_size):
        raise UserError(
            f"The baseline in {run} is a {has.backbone} for {height}x{width} pictures; pass --backbone {has.backbone} "
            f"--input-size {height}x{width}."
        )
    if has.windows != asked.windows:
        used = "none" if has.windows == NO_WINDOWS else "{},{}".format(*has.windows)
        raise UserError(f"The baseline in {run} was trained with --windows {used}; pass the same.")
    if has.shift != asked.shift:
        raise UserError(f"The baseline in {run} was trained with --shift {has.shift}; pass the same.")


def _check_images(run: Path, record: layout.RunRecord) -> None:
    """Refuse a baseline that has seen held-out images: they would no longer serve their purpose."""
    found = layout.read_record(run)
    if found.data.fingerprint != record.data.fingerprint:
        raise UserError(
            f"The baseline in {run} was trained on other images or another split of them; use the data, the --seed "
            f"({found.config.train.seed}) and the data options that it was trained with."
        )
