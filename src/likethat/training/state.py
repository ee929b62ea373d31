"""All that a run has reached, and the one file it is saved in."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from likethat.config import TrainConfig
from likethat.distributed import from_first
from likethat.models.baseline import PlainClassifier
from likethat.models.protopnet import ProtoPNet, set_latent_width
from likethat.runs import layout
from likethat.runs.atomic_files import (
    load_optimizer_tensors,
    load_tensors,
    optimizer_tensors,
    save_tensors,
    strip_prefix,
    with_prefix,
    write_text,
)
from likethat.training.phases import start_stage
from likethat.training.project import Projection


@dataclass
class Progress:
    """What a checkpoint holds besides the configuration."""

    model: ProtoPNet
    plain: PlainClassifier | None = None  # shares the model's backbone until it becomes the frozen teacher
    plain_is_teacher: bool = False
    position: int = 0  # in the plan
    batch: int = 0  # done in the current epoch
    totals: dict[str, Tensor] = field(default_factory=dict)  # sums of the epoch's costs
    optimizer: torch.optim.Optimizer | None = None
    optimizer_stage: str = ""
    projection: Projection | None = None  # where the prototypes come from
    best_accuracy: float = -1.0  # on validation, of the best cycle so far
    best_model: dict[str, Tensor] = field(default_factory=dict)
    best_projection: Projection | None = None
    best_unsolved_KP: Tensor | None = None  # its last layer before that was solved
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def optimizer_for(self, stage: str, config: TrainConfig) -> torch.optim.Optimizer:
        """One optimiser a stage; that of the joint stage lives on through later cycles."""
        if self.optimizer is None or self.optimizer_stage != stage:
            self.optimizer = start_stage(self.model, self.plain.head if self.plain else None, stage, config)
            self.optimizer_stage = stage
        return self.optimizer

    def share_projection(self) -> None:
        """The first process's, on all."""
        if self.projection is not None:
            for values_P in vars(self.projection).values():
                from_first(values_P)

    def make_teacher(self) -> None:
        """The plain classifier keeps the backbone as it is now; the model's own goes on to change."""
        self.plain = copy.deepcopy(self.plain)
        assert self.plain is not None
        self.plain.eval().requires_grad_(False)
        self.plain_is_teacher = True


DOCUMENT = ("plain_is_teacher", "position", "batch", "optimizer_stage", "best_accuracy", "metrics")


def save_progress(progress: Progress, run: Path) -> None:
    """One file, replaced as a whole; metrics.jsonl follows from it."""
    tensors = with_prefix("model", progress.model.state_dict())
    if progress.plain is not None:
        plain = progress.plain if progress.plain_is_teacher else progress.plain.head
        tensors |= with_prefix("plain", plain.state_dict())
    tensors |= with_prefix("totals", progress.totals)
    tensors |= with_prefix("best_model", progress.best_model)
    if progress.optimizer is not None:
        tensors |= with_prefix("optimizer", optimizer_tensors(progress.optimizer))
    for name, projection in (("projection", progress.projection), ("best_projection", progress.best_projection)):
        if projection is not None:
            tensors |= with_prefix(name, vars(projection))
    if progress.best_unsolved_KP is not None:
        tensors["best_unsolved_KP"] = progress.best_unsolved_KP
    save_tensors(run / layout.STATE, tensors, {name: getattr(progress, name) for name in DOCUMENT})
    write_metrics(run, progress.metrics)


def load_progress(progress: Progress, run: Path, config: TrainConfig) -> None:
    """Fills a fresh `progress` with the saved state, where there is one."""
    if not (run / layout.STATE).is_file():
        return
    tensors, document = load_tensors(run / layout.STATE)
    for name in DOCUMENT:
        setattr(progress, name, document[name])
    model = strip_prefix("model", tensors)
    set_latent_width(progress.model, model["prototype_layer.prototype_PDhw"].shape[1])  # the run may have chosen it
    progress.model.load_state_dict(model)
    if progress.plain is not None:
        if progress.plain_is_teacher:
            progress.make_teacher()
        plain = progress.plain if progress.plain_is_teacher else progress.plain.head
        plain.load_state_dict(strip_prefix("plain", tensors))
    device = next(progress.model.parameters()).device
    progress.totals = {name: value.to(device) for name, value in strip_prefix("totals", tensors).items()}
    progress.best_model = strip_prefix("best_model", tensors)
    progress.best_unsolved_KP = tensors.get("best_unsolved_KP")
    if stage := progress.optimizer_stage:
        progress.optimizer_stage = ""
        load_optimizer_tensors(progress.optimizer_for(stage, config), strip_prefix("optimizer", tensors))
    for name in ("projection", "best_projection"):
        if saved := strip_prefix(name, tensors):
            setattr(progress, name, Projection(**{key: value.to(device) for key, value in saved.items()}))


def write_metrics(run: Path, metrics: list[dict[str, Any]]) -> None:
    write_text(run / layout.METRICS, "".join(json.dumps(record) + "\n" for record in metrics))
