"""The plan of a run: which stage follows which, what moves in it, and how fast."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from likethat.config.settings import TrainConfig
from likethat.models.baseline import BaselineClassifier
from likethat.models.protopnet import ProtoPNet

# Stages of a ProtoPNet that its counterpart without prototypes has, by what they are there.
COUNTERPARTS = {"baseline": "baseline", "choose": "teach", "warm": "warm", "joint": "joint", "last_layer": "keep"}
WARM_UP_SHARE = 0.08  # of a stage, in which a learning rate with a cosine rises
RESNET34_SIZE = 0.0214  # of its weights from ImageNet, median of the layers: the preset's rate was chosen on it


@dataclass(frozen=True)
class PlanEntry:
    """One entry of the plan: an epoch of gradient descent, a choice of prototypes, a projection, or a last layer."""

    stage: str
    cycle: int = 0
    epoch: int = 0  # within the stage, counted on over cycles

    @property
    def is_epoch(self) -> bool:
        return self.stage in ("baseline", "warm", "joint")

    @property
    def is_exact(self) -> bool:
        """Return whether the stage computes what the finished run says: not what epochs and choices go by. Only where
        the patches of a projection are searched, convolutions may be rough all the same: it embeds them exactly."""
        return not self.is_epoch and self.stage not in ("parts", "choose")


def make_plan(config: TrainConfig) -> list[PlanEntry]:
    """Return the plan: [baseline, choose,] warm, then [joint, project, last layer] for each cycle."""
    baseline_epochs = 0 if config.from_baseline else config.baseline_epochs
    plan = [PlanEntry("baseline", 0, epoch) for epoch in range(baseline_epochs)]
    if config.has_baseline:
        plan = [PlanEntry("parts"), *plan, PlanEntry("choose")]
    plan += [PlanEntry("warm", 0, epoch) for epoch in range(config.warm_epochs)]
    done = 0
    for cycle, epochs in enumerate(config.joint_epochs):
        plan += [PlanEntry("joint", cycle, done + epoch) for epoch in range(epochs)]
        plan += [PlanEntry("project", cycle), PlanEntry("last_layer", cycle)]
        done += epochs
    return plan


def make_counterpart_plan(config: TrainConfig) -> list[PlanEntry]:
    """Return the plan of a classifier that is trained as long as a ProtoPNet: the same epochs, and no prototypes. It is
    its own teacher where prototypes are chosen, and is kept where a cycle ends."""
    plan = make_plan(config)
    return [replace(entry, stage=COUNTERPARTS[entry.stage]) for entry in plan if entry.stage in COUNTERPARTS]


def epochs_of(stage: str, config: TrainConfig) -> int:
    """Return the epochs of a stage of gradient descent, over all cycles."""
    epochs = {"baseline": config.baseline_epochs, "warm": config.warm_epochs, "joint": sum(config.joint_epochs)}
    return epochs[stage]


def steps_of_epoch(images: int, config: TrainConfig) -> int:
    return -(-images * config.views // config.batch_size)


def title_of(entry: PlanEntry, config: TrainConfig) -> str:
    """Return an epoch's name for people: 'joint epoch 3 of 40'."""
    return f"{entry.stage} epoch {entry.epoch + 1} of {epochs_of(entry.stage, config)}"


def epochs_to_come(plan: list[PlanEntry], position: int) -> int:
    """Return how many epochs of one stage follow each other from here on."""
    stage = plan[position].stage
    return next((n for n, entry in enumerate(plan[position:]) if entry.stage != stage), len(plan) - position)


def comes_again(stage: str, plan: list[PlanEntry], position: int) -> bool:
    """Return whether the plan has the stage from here on."""
    return any(entry.stage == stage for entry in plan[position:])


def relative_size(backbone: nn.Module) -> float:
    """Return how large the weights of a backbone's median layer are, next to those of ResNet-34. Adam moves a weight by
    as much as the learning rate says, however large it is: the same rate changes a network of large weights less."""
    size_L = [weight.detach().square().mean().sqrt() for weight in backbone.parameters() if weight.ndim > 1]
    return float(torch.stack(size_L).median()) / RESNET34_SIZE


def start_stage(
    model: ProtoPNet | BaselineClassifier | None,
    baseline: BaselineClassifier | None,
    stage: str,
    config: TrainConfig,
    backbone_size: float = 1.0,
) -> torch.optim.Optimizer:
    """Freeze what the stage leaves alone and return the optimiser of the rest; the last layer is fixed in all. In joint
    training the backbone's learning rate is multiplied by `backbone_size`."""
    if model is not None:
        model.requires_grad_(False)
    parts: list[tuple[Iterable[nn.Parameter], float, float]] = []
    decay = config.weight_decay
    if stage == "baseline":
        assert baseline is not None
        parts += [
            (baseline.backbone.parameters(), config.baseline_lr, decay),
            (baseline.head.parameters(), config.head_lr, decay),
        ]
    else:
        assert model is not None
        if stage == "joint":
            parts.append((model.backbone.parameters(), backbone_size * config.backbone_lr, decay))
        after_backbone = model.head if isinstance(model, BaselineClassifier) else model.add_on
        parts.append((after_backbone.parameters(), config.add_on_lr, decay))
        if isinstance(model, ProtoPNet) and not config.tie:
            parts.append(([model.prototype_layer.prototype_PDhw], config.prototype_lr, 0.0))
    groups = [group for part in parts for group in _groups(*part, spare_vectors=config.decoupled_decay)]
    for group in groups:
        for parameter in group["params"]:
            parameter.requires_grad_(True)
    kind = torch.optim.AdamW if config.decoupled_decay else torch.optim.Adam
    device = groups[0]["params"][0].device
    if device.type != "cuda":
        return kind(groups)
    for group in groups:  # a captured step reads the learning rate from where it was when captured
        group["lr"] = torch.tensor(group["lr"], device=device)
    return kind(groups, fused=True, capturable=True)


def _groups(
    parameters: Iterable[nn.Parameter], lr: float, decay: float, *, spare_vectors: bool
) -> list[dict[str, Any]]:
    """Group parameters by their decay: ours spares biases and the gains of norms, which have no scale to keep in
    check; the authors' does not."""
    parameters = list(parameters)
    decayed = [parameter for parameter in parameters if parameter.ndim > 1 or not spare_vectors]
    spared = [parameter for parameter in parameters if parameter.ndim <= 1 and spare_vectors]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": spared, "weight_decay": 0.0}]
    return [{**group, "lr": lr, "full_lr": lr} for group in groups if group["params"]]


def set_learning_rates(optimizer: torch.optim.Optimizer, entry: PlanEntry, done: float, config: TrainConfig) -> None:
    """Set the rates for where training is: `done` is the share of the epoch."""
    factor = lr_factor(entry, done, config)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(group["full_lr"] * factor)
        else:
            group["lr"] = group["full_lr"] * factor


def lr_factor(entry: PlanEntry, done: float, config: TrainConfig) -> float:
    """Return the factor of the learning rate: a tenth every `lr_step` joint epochs, counted as the authors' code
    counts (it steps before the first epoch); or, with no `lr_step`, up in a straight line and then a cosine to zero
    over all epochs of the stage."""
    if config.lr_step:
        return float(0.1 ** ((entry.epoch + 1) // config.lr_step)) if entry.stage == "joint" else 1.0
    share = (entry.epoch + done) / epochs_of(entry.stage, config)
    if share < WARM_UP_SHARE:
        return (share + 1e-4) / WARM_UP_SHARE
    return 0.5 + 0.5 * math.cos(math.pi * (share - WARM_UP_SHARE) / (1 - WARM_UP_SHARE))


def set_mode(model: nn.Module, stage: str, images: int, config: TrainConfig) -> None:
    """Set training or evaluation mode for the stage: from a projection until joint training resumes nothing before the
    last layer moves, BatchNorm included."""
    model.train(stage in ("baseline", "warm", "joint"))
    if not learns_statistics(stage, images, config):
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()


def learns_statistics(stage: str, images: int, config: TrainConfig) -> bool:
    """Return whether BatchNorm learns its statistics in a stage of gradient descent.

    Few images give poor statistics, so BatchNorm then keeps those that came with the weights; and tied prototypes
    must be what the network makes of them in evaluation, so they never see others.
    """
    return images >= config.batch_norm_images and not (config.tie and stage != "baseline")
