"""Maps with smaller cells, and where in the picture a cell looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from likethat.runtime import seed_for

PICTURES = 2  # that gradients are averaged over


@torch.no_grad()
def refine_map(net: Any, size_hw: tuple[int, int]) -> None:
    """Make the last stride of 2 in a network 1, so that its map has twice as many rows and columns.

    Weights stay, and nothing is dilated: a cell also sees less of the picture. A network whose last step is no such
    stride (one of tokens, say) keeps its map.
    """
    halving: dict[int, list[Any]] = {}  # by the height of what they give

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        given, made = inputs[0].shape[2], output.shape[2]
        if given in (2 * made, 2 * made - 1):
            halving.setdefault(made, []).append(module)

    kinds = nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d
    strided = [module for module in net.modules() if isinstance(module, kinds) and _first(module.stride) == 2]
    hooks = [module.register_forward_hook(note) for module in strided]
    training = net.training
    feature = net.eval().forward_features(torch.zeros(1, 3, *size_hw))
    net.train(training)
    for hook in hooks:
        hook.remove()
    if feature.ndim != 4:
        return
    for module in halving.get(feature.shape[2], []):
        if isinstance(module, nn.Conv2d):
            module.stride = (1, 1)
        elif _first(module.kernel_size) == 2:
            module.kernel_size = module.stride = 1  # windows side by side become single cells
        else:
            module.stride = 1


def _first(value: Any) -> int:
    """Return the first of two numbers, or the only one."""
    return int(value[0] if isinstance(value, tuple) else value)


def looking_offset(features: Callable[[Tensor], Tensor], size_hw: tuple[int, int]) -> tuple[float, float]:
    """Return how far below and to the right of its place in the map a cell looks: whole and half cells.

    Strides of 2 with padding on one side add up to half a cell. It is read off the gradients of the cells in the
    middle, which the picture's rim does not bend.
    """
    generator = torch.Generator().manual_seed(seed_for("looking offset"))
    with torch.enable_grad():
        x_B3HW = torch.rand(PICTURES, 3, *size_hw, generator=generator).requires_grad_()
        feature_BCHW = features(x_B3HW)
        rows, columns = feature_BCHW.shape[2:]
        middle = feature_BCHW[:, :, (rows - 1) // 2 : rows // 2 + 1, (columns - 1) // 2 : columns // 2 + 1]
        (gradient_B3HW,) = torch.autograd.grad(middle.square().sum(), x_B3HW)
    weight_HW = gradient_B3HW.square().sum((0, 1)).double()
    offsets = []
    for axis, cells in ((1, rows), (0, columns)):
        line_n = weight_HW.sum(axis)
        centre = float((line_n * (torch.arange(len(line_n)) + 0.5)).sum() / line_n.sum()) / len(line_n)
        offsets.append(round(2 * (centre - 0.5) * cells) / 2)
    return offsets[0], offsets[1]
