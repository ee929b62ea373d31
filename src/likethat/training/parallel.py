"""Gradients and BatchNorm of several processes as those of one that has the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import timm.layers
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from likethat.distributed import all_reduce_sum, world_size
from likethat.errors import UserError
from likethat.training.losses import Costs, CostsOf


def check_enough_images(batch: int) -> None:
    """Refuse steps that have fewer images than there are processes."""
    if batch < world_size():
        raise UserError(
            f"A step has {batch} images for {world_size()} processes; start fewer, or pass a larger --batch-size."
        )


class Trained(nn.Module):
    """Costs as a module's forward pass, which is what DistributedDataParallel watches."""

    def __init__(self, module: nn.Module, costs_of: CostsOf) -> None:
        super().__init__()
        self.module, self.costs_of = module, costs_of

    def forward(self, *shown: Tensor) -> Costs:
        return self.costs_of(*shown)


def average_gradients(module: nn.Module, costs_of: CostsOf) -> CostsOf:
    """Return the same costs; going back through them averages the gradients of `module` over the processes. The
    parameters that are trained must be known, and are the main process's from now on."""
    if world_size() == 1:
        return costs_of
    # Every step of a stage has the same graph; some backbones have parameters that are not in it.
    return DistributedDataParallel(Trained(module, costs_of), static_graph=True)


def mean_over_processes(costs: Costs, share: float) -> Costs:
    """Return the means over the whole batch, of which this process has seen a share."""
    values = all_reduce_sum(torch.stack([value.float() for value in costs.values()]) * share)
    return dict(zip(costs, values.unbind(), strict=True))


class _AllReduceSum(torch.autograd.Function):
    """Each process's costs depend on the sum, so that the gradients of all of them reach each summand."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return all_reduce_sum(values.clone())

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return all_reduce_sum(gradients[0].clone())


def all_reduce_sum_with_gradient(values: Tensor) -> Tensor:
    summed: Tensor = _AllReduceSum.apply(values)
    return summed


def synchronise_norms(model: nn.Module) -> None:
    """Let BatchNorm that learns its statistics take them from the whole batch: by torch's own SyncBatchNorm on CUDA,
    which the CPU does not have, and by a few simple operations there."""
    if world_size() == 1:
        return
    if next(model.parameters()).device.type == "cuda":
        timm.layers.convert_sync_batchnorm(model)
        return
    for norm in model.modules():
        if isinstance(norm, _BatchNorm):
            norm.forward = partial(_norm_of_whole_batch, norm, norm.forward)  # type: ignore[method-assign]


def _norm_of_whole_batch(norm: _BatchNorm, alone: Callable[[Tensor], Tensor], x_BCHW: Tensor) -> Tensor:
    if not norm.training:
        return alone(x_BCHW)
    count = x_BCHW.numel() // x_BCHW.shape[1]
    sums_C = all_reduce_sum_with_gradient(torch.cat([x_BCHW.sum((0, 2, 3)), x_BCHW.new_tensor([count])]))
    everywhere = sums_C[-1].detach()
    mean_C = sums_C[:-1] / everywhere
    centred_BCHW = x_BCHW - mean_C[:, None, None]
    variance_C = all_reduce_sum_with_gradient(centred_BCHW.square().sum((0, 2, 3))) / everywhere
    _follow(norm, mean_C.detach(), variance_C.detach() * everywhere / (everywhere - 1))
    y_BCHW = centred_BCHW * (variance_C + norm.eps).rsqrt()[:, None, None]
    if norm.affine:
        y_BCHW = y_BCHW * norm.weight[:, None, None] + norm.bias[:, None, None]
    # timm has norms with an activation in them.
    return getattr(norm, "act", nn.Identity())(getattr(norm, "drop", nn.Identity())(y_BCHW))


@torch.no_grad()
def _follow(norm: _BatchNorm, mean_C: Tensor, variance_C: Tensor) -> None:
    """Update the running statistics, as BatchNorm does."""
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return
    norm.num_batches_tracked += 1
    step = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean_C, step)
    norm.running_var.lerp_(variance_C, step)
