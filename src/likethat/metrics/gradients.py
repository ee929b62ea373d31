"""Gradients of one prototype's similarity with respect to the picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from likethat.models.protopnet import ProtoPNet


def similarity_gradient(network: ProtoPNet, x_B3HW: Tensor, prototype_B: Tensor) -> Tensor:
    """Return d score / d picture, of another prototype in every picture; `prototype_B` counts within the network."""
    with torch.enable_grad():
        x_B3HW = x_B3HW.detach().requires_grad_()
        score_B = network(x_B3HW).score_BP.gather(1, prototype_B[:, None])
        # In evaluation mode pictures do not mix, so the gradient of the sum holds that of each.
        gradient_B3HW: Tensor = torch.autograd.grad(score_B.sum(), x_B3HW)[0]
    return gradient_B3HW


def by_member(networks: Sequence[ProtoPNet], prototype_B: Tensor, work: Callable[[int, Tensor, Tensor], None]) -> None:
    """Call `work` for every member with some of these prototypes: its number, the rows, the prototypes within it."""
    start = 0
    for member, network in enumerate(networks):
        count = len(network.prototype_layer.class_P)
        mine = ((prototype_B >= start) & (prototype_B < start + count)).nonzero()[:, 0]
        if len(mine):
            work(member, mine, prototype_B[mine] - start)
        start += count
