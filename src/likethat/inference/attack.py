"""Changes of pictures that lower a similarity as much as possible, and leave what it should rest on as it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


@torch.compiler.disable  # a gradient is taken within, which is not compiled
def lower_similarity(
    similarity_of: Callable[[Tensor], Tensor],
    x_B3HW: Tensor,
    change_B3HW: Tensor,
    free_B1HW: Tensor,
    *,
    bound: Tensor,
    step: Tensor,
    steps: int,
) -> Tensor:
    """Return a change of the free pixels, by `bound` at most, after so many steps that lower the similarities, B.

    The steps begin with `change_B3HW` and go along the sign of the gradient. Pictures must not mix in `similarity_of`:
    the gradient of the sum holds that of each.
    """
    for _ in range(steps):
        with torch.enable_grad():
            changed_B3HW = (x_B3HW + change_B3HW).detach().requires_grad_()
            gradient_B3HW = torch.autograd.grad(similarity_of(changed_B3HW).sum(), changed_B3HW)[0]
        change_B3HW = (change_B3HW - step * gradient_B3HW.sign() * free_B1HW).clamp(-bound, bound)
    return change_B3HW
