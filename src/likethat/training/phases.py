"""The plan of a run: which stage follows which, what moves in it, and how fast."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from likethat.config import TrainConfig
from likethat.models.protopnet import ProtoPNet


@dataclass(frozen=True)
class Step:
    """One entry of the plan: an epoch of gradient descent, a projection, or a last-layer optimisation."""

    stage: str
    cycle: int = 0
    epoch: int = 0  # within the stage, counted on over cycles

    @property
    def is_epoch(self) -> bool:
        return self.stage in ("warm", "joint")

    def __str__(self) -> str:
        return f"{self.stage} epoch {self.epoch + 1}" if self.is_epoch else self.stage.replace("_", " ")


def make_plan(config: TrainConfig) -> list[Step]:
    """warm, then [joint, project, last layer] for each cycle."""
    plan = [Step("warm", 0, epoch) for epoch in range(config.warm_epochs)]
    done = 0
    for cycle, epochs in enumerate(config.joint_epochs):
        plan += [Step("joint", cycle, done + epoch) for epoch in range(epochs)]
        plan += [Step("project", cycle), Step("last_layer", cycle)]
        done += epochs
    return plan


def trainable_groups(model: ProtoPNet, stage: str, config: TrainConfig) -> list[dict[str, object]]:
    """Parameter groups of a stage with their full learning rates; the last layer is fixed in all of them."""
    groups: list[dict[str, object]] = [
        {"params": list(model.add_on.parameters()), "lr": config.add_on_lr, "weight_decay": config.weight_decay},
        {"params": [model.prototype_layer.prototype_PDhw], "lr": config.prototype_lr, "weight_decay": 0.0},
    ]
    if stage == "joint":
        backbone = list(model.backbone.parameters())
        groups.insert(0, {"params": backbone, "lr": config.backbone_lr, "weight_decay": config.weight_decay})
    return groups


def start_stage(model: ProtoPNet, stage: str, config: TrainConfig) -> torch.optim.Optimizer:
    """Freezes what the stage leaves alone and gives the optimiser of the rest."""
    model.requires_grad_(False)
    groups = trainable_groups(model, stage, config)
    for group in groups:
        for parameter in group["params"]:  # type: ignore[attr-defined]
            parameter.requires_grad_(True)
        group["full_lr"] = group["lr"]
    return torch.optim.Adam(groups)


def set_learning_rates(optimizer: torch.optim.Optimizer, step: Step, progress: float, config: TrainConfig) -> None:
    """`progress` is the share of the epoch that is done."""
    factor = lr_factor(step, progress, config)
    for group in optimizer.param_groups:
        group["lr"] = group["full_lr"] * factor


def lr_factor(step: Step, progress: float, config: TrainConfig) -> float:
    """Joint training: to a tenth every `lr_step` epochs, counted as the authors' code counts (it steps before the
    first epoch), or a cosine to zero over all joint epochs."""
    if step.stage != "joint":
        return 1.0
    if config.lr_step:
        return float(0.1 ** ((step.epoch + 1) // config.lr_step))
    return 0.5 + 0.5 * math.cos(math.pi * (step.epoch + progress) / max(1, sum(config.joint_epochs)))


def set_mode(model: nn.Module, stage: str) -> None:
    """From a projection until joint training resumes nothing before the last layer moves, BatchNorm included."""
    model.train(stage in ("warm", "joint"))
