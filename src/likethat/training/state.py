"""All that a run has reached, and the one file it is saved in."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from likethat import __version__
from likethat.config.presets import from_dict
from likethat.config.settings import TrainConfig
from likethat.distributed import broadcast_model, broadcast_tensor, is_main_process
from likethat.errors import UserError
from likethat.inference.feature_maps import FeatureMaps
from likethat.models.backbone import Backbone
from likethat.models.baseline import BaselineClassifier
from likethat.models.protopnet import ProtoPNet, set_latent_width
from likethat.runs import layout
from likethat.runs.atomic_files import (
    copy_tensors,
    load_optimizer_tensors,
    load_tensors,
    optimizer_tensors,
    strip_prefix,
    with_prefix,
    write_tensors,
    write_text,
)
from likethat.training.course import Course
from likethat.training.parts import Parts
from likethat.training.plan import relative_size, start_stage
from likethat.training.project import Projection

SAVE_EVERY = 20.0  # seconds between saves inside a stage
WORTH_SAVING = 5.0  # seconds since the last save, from which on the end of a stage is saved


@dataclass
class RunState:
    """What a checkpoint holds besides the configuration."""

    model: ProtoPNet | BaselineClassifier | None  # None where the baseline stage is all; no ProtoPNet: its counterpart
    baseline: BaselineClassifier | None = None  # shares what it has with the model until it becomes the frozen teacher
    baseline_is_teacher: bool = False
    position: int = 0  # in the plan
    batch: int = 0  # done in the current epoch
    totals: dict[str, Tensor] = field(default_factory=dict)  # sums of the epoch's costs
    optimizer: torch.optim.Optimizer | None = None
    optimizer_stage: str = ""
    backbone_size: float | None = None  # of its weights before joint training, where rates are relative
    projection: Projection | None = None  # where the prototypes come from
    parts: Parts | None = None  # of the training images
    maps: FeatureMaps | None = None  # of them, while the backbone stays as it is; not saved
    val_score_NP: Tensor | None = None  # of the validation images, from a projection to its last layer; not saved
    best_accuracy: float = -1.0  # on validation, of the best cycle so far
    best_model: dict[str, Tensor] = field(default_factory=dict)
    best_projection: Projection | None = None
    best_unsolved_KP: Tensor | None = None  # its last layer before that was solved
    best_val_NK: Tensor | None = None  # its logits of the validation images; not saved
    metrics: list[dict[str, Any]] = field(default_factory=list)

    @property
    def protopnet(self) -> ProtoPNet:
        """Return the model, in stages that train or change one with prototypes."""
        assert isinstance(self.model, ProtoPNet)
        return self.model

    @property
    def network(self) -> nn.Module:
        """Return all that the run trains, or its backbone at least."""
        network = self.baseline if self.model is None else self.model
        assert network is not None
        return network

    @property
    def backbone(self) -> Backbone:
        """Return the backbone of all that the run trains."""
        network = self.network
        assert isinstance(network, ProtoPNet | BaselineClassifier)
        return network.backbone

    def trained(self, stage: str) -> nn.Module:
        """Return what gradient descent works on in a stage."""
        network = self.baseline if stage == "baseline" else self.model
        assert network is not None
        return network

    def optimizer_for(self, stage: str, config: TrainConfig) -> torch.optim.Optimizer:
        """Return the optimiser of a stage; that of the joint stage lives on through later cycles."""
        if self.optimizer is None or self.optimizer_stage != stage:
            if stage == "joint" and config.relative_lr and self.backbone_size is None:
                self.backbone_size = relative_size(self.backbone)
            self.optimizer = start_stage(self.model, self.baseline, stage, config, self.backbone_size or 1.0)
            self.optimizer_stage = stage
        return self.optimizer

    def forget_optimizer(self) -> None:
        """Let go of an optimiser whose stage does not come again: it is half of what a state has to hold."""
        self.optimizer, self.optimizer_stage = None, ""

    def share(self) -> None:
        """Go on with the model and the projection of the main process, in all processes."""
        broadcast_model(self.network)
        for found in (self.projection, self.parts):
            for value in vars(found).values() if found is not None else ():
                broadcast_tensor(value)

    def make_teacher(self) -> None:
        """Leave the baseline the backbone as it is now; the model's own goes on to change."""
        self.baseline = copy.deepcopy(self.baseline)
        assert self.baseline is not None
        self.baseline.eval().requires_grad_(False)
        self.baseline_is_teacher = True

    def own_part_of_baseline(self) -> nn.Module | None:
        """Return what of the baseline is not the model's."""
        if self.baseline is self.model:
            return None
        if self.baseline is None or self.model is None or self.baseline_is_teacher:
            return self.baseline
        return self.baseline.head


FORMAT = 4  # of the file
FOUND = {"projection": Projection, "best_projection": Projection, "parts": Parts}
DOCUMENT = ("baseline_is_teacher", "position", "batch", "optimizer_stage", "backbone_size", "best_accuracy", "metrics")


class Saver:
    """Saves a run now and then, and when told; of several processes the main one does.

    A state is copied at once and written while training goes on, one after another. At the end of the block all are
    written; a process that is killed before leaves the last one that was.
    """

    def __init__(self, state: RunState, course: Course) -> None:
        self.state, self.course, self.last = state, course, time.monotonic()
        self.writer = ThreadPoolExecutor(1)
        self.writing: Future[None] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        with self.writer:
            self.wait()

    def wait(self) -> None:
        """Wait until the last state is written; tell here why it could not be."""
        if self.writing is not None:
            writing, self.writing = self.writing, None
            writing.result()

    def save(self) -> None:
        if is_main_process():
            self.wait()
            self.writing = self.writer.submit(copy_run_state(self.state, self.course))
        self.last = time.monotonic()

    def save_after_stage(self) -> None:
        """Save the end of a stage, unless what was done since the last save is done again in no time."""
        if time.monotonic() - self.last > WORTH_SAVING or not (self.course.run / layout.STATE).is_file():
            self.save()

    def save_if_due(self) -> None:
        if time.monotonic() - self.last > SAVE_EVERY:
            self.save()


def copy_run_state(state: RunState, course: Course) -> Callable[[], None]:
    """Copy the state as it is now; return what writes the copy, whatever has become of the state by then: one file,
    replaced as a whole, and metrics.jsonl, which follows from it."""
    tensors = with_prefix("totals", state.totals)
    for name, network in (("model", state.model), ("baseline", state.own_part_of_baseline())):
        if network is not None:
            tensors |= with_prefix(name, network.state_dict())
    tensors |= with_prefix("best_model", state.best_model)
    if state.optimizer is not None:
        tensors |= with_prefix("optimizer", optimizer_tensors(state.optimizer))
    for name in FOUND:
        if (found := getattr(state, name)) is not None:
            tensors |= with_prefix(name, vars(found))
    if state.best_unsolved_KP is not None:
        tensors["best_unsolved_KP"] = state.best_unsolved_KP
    head = {
        "format": FORMAT,
        "versions": versions(),
        "device": course.train.device.type,
        "images": course.fingerprint,
        "config": course.config.to_dict(),
    }
    copies, metrics = copy_tensors(tensors), list(state.metrics)
    document = {**head, **{name: getattr(state, name) for name in DOCUMENT}, "metrics": metrics}

    def write() -> None:
        write_tensors(course.run / layout.STATE, copies, document)
        write_metrics(course.run, metrics)

    return write


def load_run_state(state: RunState, course: Course) -> None:
    """Fill a fresh `state` with the saved one, where there is one."""
    file = course.run / layout.STATE
    if not file.is_file():
        return
    try:
        tensors, document = load_tensors(file)
    except UserError as error:
        raise UserError(f"{file} is damaged, so the run cannot go on; start it again with --overwrite.") from error
    _check_origin(document, course)
    try:
        _fill(state, tensors, document, course.config.train)
    except torch.OutOfMemoryError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{file} does not fit the network that this run trains; it was saved with {_told(document['versions'])}. "
            "Resume with these versions, or start again with --overwrite."
        ) from error


def versions() -> dict[str, str]:
    """Return what decides whether a saved state fits, and whether what follows has the same bits."""
    return {"likethat": __version__, "torch": str(torch.__version__), "timm": timm.__version__}


def _told(made_with: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in made_with.items())


def _check_origin(document: Any, course: Course) -> None:
    """Refuse a state that this version cannot read or that belongs to another run; note other versions of libraries and
    another device."""
    file = course.run / layout.STATE
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        made_with = document.get("versions") if isinstance(document, dict) else None
        named = f" ({_told(made_with)})" if made_with else ""
        raise UserError(
            f"{file} is of another version of likethat{named}; resume with that one, or start again with --overwrite."
        )
    if document["images"] != course.fingerprint or from_dict(document["config"]) != course.config:
        raise UserError(
            f"{file} belongs to another run, with other settings or images; put this run's own back, or start again "
            "with --overwrite."
        )
    here, there = course.train.device.type, document.get("device", course.train.device.type)
    if (document["versions"], there) != (versions(), here):
        before, after = (f" on {there}", f" on {here}") if there != here else ("", "")
        course.display.line(
            f"note: the run was saved with {_told(document['versions'])}{before} and goes on with {_told(versions())}"
            f"{after}: it may not end the same to the bit"
        )


def _fill(state: RunState, tensors: dict[str, Tensor], document: dict[str, Any], config: TrainConfig) -> None:
    for name in DOCUMENT:
        setattr(state, name, document[name])
    if state.model is not None:
        saved_model = strip_prefix("model", tensors)
        if isinstance(state.model, ProtoPNet):
            width = saved_model["prototype_layer.prototype_PDhw"].shape[1]  # the run may have chosen it
            set_latent_width(state.model, width)
        state.model.load_state_dict(saved_model)
    if state.baseline_is_teacher:
        state.make_teacher()
    if (baseline := state.own_part_of_baseline()) is not None:
        baseline.load_state_dict(strip_prefix("baseline", tensors))
    device = next(state.network.parameters()).device
    state.totals = {name: value.to(device) for name, value in strip_prefix("totals", tensors).items()}
    state.best_model = strip_prefix("best_model", tensors)
    state.best_unsolved_KP = tensors.get("best_unsolved_KP")
    if stage := state.optimizer_stage:
        state.optimizer_stage = ""
        load_optimizer_tensors(state.optimizer_for(stage, config), strip_prefix("optimizer", tensors))
    for name, kind in FOUND.items():
        if saved := strip_prefix(name, tensors):
            setattr(state, name, kind(**{key: value.to(device) for key, value in saved.items()}))


def write_metrics(run: Path, metrics: list[dict[str, Any]]) -> None:
    write_text(run / layout.METRICS, "".join(json.dumps(record) + "\n" for record in metrics))
