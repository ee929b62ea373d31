"""Maps with smaller cells."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


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
