"""Steps of gradient descent in less memory than a whole batch takes, where that is the machine's own.

Gradients of micro-batches are accumulated to those of the whole batch: the step is the same, up to rounding. BatchNorm
that learns its statistics needs the whole batch. There it stays whole, and activations of the network's blocks are
checkpointed: computed again in the backward pass instead of kept, the same bits for a third more time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from likethat.distributed import world_size
from likethat.models.backbone import Backbone
from likethat.training.batches import Shown
from likethat.training.losses import Costs, CostsOf
from likethat.training.wrap_step import GradientStep

MOST_BYTES = 1 << 30  # of activations that a micro-batch keeps for the backward pass


def save_memory(step: GradientStep, backbone: Backbone, batch: int, *, learns_statistics: bool) -> GradientStep:
    """Return what takes the same step on batches of that size, in parts where a whole one would need much memory.

    What moves in the stage must be known. On CUDA, and of several processes, which have a part of the batch each, the
    step stays as it is.
    """
    if next(backbone.parameters()).device.type == "cuda" or world_size() > 1:
        return step
    at_once = max(1, MOST_BYTES // max(1, bytes_of_picture(backbone)))
    if batch <= at_once:
        return step
    if learns_statistics and any(isinstance(module, _BatchNorm) for module in backbone.modules()):
        return partial(_step_with_recomputing, step, backbone)
    return partial(step, at_once=at_once)


def parts_of(shown: Shown, at_once: int | None = None) -> Iterator[tuple[Shown, float]]:
    """Yield a batch in parts of about one size, of at most so many pictures, with their shares of it; without a number,
    yield it as it is.

    A part comes with the picture before it, where its first is compared with that one.
    """
    size = len(shown.label_BV)
    if at_once is None or size <= at_once:
        yield shown, 1.0
        return
    count = -(-size // at_once)
    for start, end in pairwise(size * number // count for number in range(count + 1)):
        x_b3HW, *known = (value[start:end] for value in shown)
        if bool(shown.same_BHW[start].any()):
            x_b3HW = torch.cat([shown.x_B3HW[[start - 1]], x_b3HW])
        yield Shown(x_b3HW, *known), (end - start) / size


def bytes_of_picture(backbone: Backbone) -> int:
    """Return how much memory one picture takes for the backward pass of a backbone, whose parameters
    that move are known. The backbone is in evaluation mode afterwards."""
    return bytes_kept(backbone.eval(), torch.zeros(1, 3, *backbone.input_size, device=backbone.mean.device))


@torch.enable_grad()
def bytes_kept(network: nn.Module, x_B3HW: Tensor) -> int:
    """Return how much memory pictures take for the backward pass of a network, besides its weights."""
    weights = {value.untyped_storage().data_ptr() for value in (*network.parameters(), *network.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        network(x_B3HW)
    return sum(value.untyped_storage().nbytes() for place, value in kept.items() if place not in weights)


def _step_with_recomputing(
    step: GradientStep, backbone: Backbone, shown: Shown, costs_of: CostsOf, optimizer: torch.optim.Optimizer
) -> Costs:
    """Take the step on the whole batch, with what blocks of the network leave behind computed again when needed."""
    learned: list[Tensor] = []

    def costs_once(*values: Tensor) -> Costs:
        costs = costs_of(*values)
        learned.extend(value.clone() for value in backbone.buffers())
        return costs

    with _recomputing(backbone.net):
        costs = step(shown, costs_once, optimizer)
    for value, once in zip(backbone.buffers(), learned, strict=True):
        value.copy_(once)  # in the backward pass, BatchNorm has learned the statistics of this batch a second time
    return costs


@contextmanager
def _recomputing(net: Any) -> Iterator[None]:
    """Let a timm model keep the input of each block alone, in the block; one that cannot keeps all, as ever."""
    try:
        net.set_grad_checkpointing(True)
    except (AttributeError, AssertionError):
        yield
        return
    try:
        yield
    finally:
        net.set_grad_checkpointing(False)
