"""The last layer's problem: what is minimised, its gradient, and its scores, whole or a block of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from likethat.errors import UserError

BLOCK = 2**26  # bytes of scores that are converted at a time


@dataclass(frozen=True)
class Problem:
    """The objective of `last_layer` on the scores of N images.

    The scores may have another precision or device than the arithmetic, such as float16 in a file; then they are
    converted block by block, and never all of them are in memory.
    """

    score_NP: Tensor
    label_N: Tensor
    target_NK: Tensor  # one-hot labels, in the precision and on the device of the arithmetic
    own_KP: Tensor
    penalty_KP: Tensor  # lam, and 0 for own-class weights
    ridge: float

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Some images' scores after others', ready for arithmetic; all at once where they are that already."""
        count, prototypes = self.score_NP.shape
        ready = (self.score_NP.dtype, self.score_NP.device) == (self.target_NK.dtype, self.target_NK.device)
        size = count if ready else max(1, BLOCK // (prototypes * self.target_NK.element_size()))
        for first in range(0, count, size):
            rows = slice(first, min(first + size, count))
            yield rows, self.score_NP[rows].to(self.target_NK)

    def logits(self, weight_KP: Tensor) -> Tensor:
        """N x K."""
        blocks = [score_bP @ weight_KP.T for _, score_bP in self.blocks()]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def moments(self, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        """The sums over the images of the scores and of their squares, under K weights: K x P each."""
        first_KP = square_KP = torch.zeros(())
        for number, (rows, score_bP) in enumerate(self.blocks()):
            weight_Kb = weight_NK[rows].T
            first, square = weight_Kb @ score_bP, weight_Kb @ score_bP.square()
            first_KP, square_KP = (first_KP + first, square_KP + square) if number else (first, square)
        return first_KP, square_KP

    def weighted(self, weight_NK: Tensor) -> Tensor:
        """The first of the moments alone."""
        total_KP = torch.zeros(())
        for number, (rows, score_bP) in enumerate(self.blocks()):
            product_KP = weight_NK[rows].T @ score_bP
            total_KP = total_KP + product_KP if number else product_KP
        return total_KP


def make_problem(
    score_NP: Tensor, label_N: Tensor, class_P: Tensor, num_classes: int, lam: float, ridge: float
) -> Problem:
    if score_NP.numel() == 0 or (*label_N.shape, *class_P.shape) != score_NP.shape:
        raise UserError(
            f"scores of shape {tuple(score_NP.shape)} do not fit {len(label_N)} labels and {len(class_P)} prototype "
            "classes; give one row and label an image, one column and class a prototype"
        )
    for name, values in (("labels", label_N), ("prototype classes", class_P)):
        if not (int(values.min()) >= 0 and int(values.max()) < num_classes):
            raise UserError(f"{name} must lie in 0..{num_classes - 1}; got {int(values.min())}..{int(values.max())}")
    if not (math.isfinite(lam) and lam >= 0 and math.isfinite(ridge) and ridge > 0):
        raise UserError(f"the last layer needs lam >= 0 and ridge > 0; got lam {lam} and ridge {ridge}")
    dtype = torch.promote_types(score_NP.dtype, torch.float32)
    device = label_N.device if score_NP.device.type == "cpu" else score_NP.device  # scores in a file are the CPU's
    label_N, class_P = (x.to(device, torch.int64) for x in (label_N, class_P))
    own_KP = class_P[None] == torch.arange(num_classes, device=device)[:, None]
    target_NK = F.one_hot(label_N, num_classes).to(dtype)
    problem = Problem(score_NP.detach(), label_N, target_NK, own_KP, (~own_KP).to(dtype) * lam, ridge)
    if not all(bool(score_bP.isfinite().all()) for _, score_bP in problem.blocks()):
        raise UserError("the similarity scores hold NaN or infinity; check the network that made them")
    return problem


@contextmanager
def exact_matmul(device_type: str) -> Iterator[None]:
    """No autograd, and products in true float32: the rounding of TF32 or autocast is larger than the tolerance."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def objective_of(problem: Problem, weight_KP: Tensor, logits_NK: Tensor) -> float:
    loss_N = F.cross_entropy(logits_NK, problem.label_N, reduction="none")
    away_KP = weight_KP - problem.own_KP.to(weight_KP)
    penalty_K = (problem.penalty_KP * weight_KP.abs() + 0.5 * problem.ridge * away_KP.square()).sum(1)
    return float(wide(loss_N).mean() + wide(penalty_K).sum())


def gradient_of(problem: Problem, weight_KP: Tensor, prob_NK: Tensor) -> Tensor:
    """Gradient of the smooth terms."""
    data_KP = problem.weighted(prob_NK - problem.target_NK) / len(prob_NK)
    return data_KP + problem.ridge * (weight_KP - problem.own_KP.to(weight_KP))


def residual_of(problem: Problem, weight_KP: Tensor, logits_NK: Tensor) -> float:
    gradient_KP = gradient_of(problem, weight_KP, logits_NK.softmax(1))
    at_zero_KP = shrink(gradient_KP, problem.penalty_KP)
    elsewhere_KP = gradient_KP + problem.penalty_KP * weight_KP.sign()
    return float(torch.where(weight_KP == 0, at_zero_KP, elsewhere_KP).abs().max())


def shrink(x: Tensor, by: Tensor) -> Tensor:
    """Soft-thresholding: the proximal operator of by * |x|, exactly zero for |x| <= by."""
    return x - torch.maximum(torch.minimum(x, by), -by)


def wide(small: Tensor) -> Tensor:
    """float64, for the K unknowns of a step: the classes' common shift is large, and the coupling cancels it."""
    return small.cpu().double() if small.device.type == "mps" else small.double()  # MPS has no float64
