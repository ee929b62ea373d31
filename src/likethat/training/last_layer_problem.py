"""The last layer's problem: what is minimised, its gradient, and its scores, whole or a block of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from likethat.errors import UserError
from likethat.models.protopnet import logits_of_scores
from likethat.runtime import wide

BLOCK = 2**26  # bytes of scores that are converted at a time
EXCLUSIVE = 0.05  # how exclusive a prototype is that another class looks like just as much


@dataclass(frozen=True)
class LastLayerProblem:
    """The objective of `last_layer` on the scores of N images.

    The scores may have another precision or device than the arithmetic, such as float16 in a file; then they are
    converted block by block, and nothing that grows with the images is in memory but their labels and losses.
    """

    score_NP: Tensor
    label_N: Tensor
    own_KP: Tensor
    penalty_KP: Tensor  # lam, and 0 for own-class weights; in the precision and on the device of the arithmetic
    ridge: float | Tensor  # where it is not the same for all, K x P
    own_positive: bool = False  # whether connections of prototypes to their own class must not be negative
    weight_N: Tensor | None = None  # how much each image counts, 1 on average; None where all count alike

    @property
    def is_ready(self) -> bool:
        """Return whether arithmetic takes the scores as they are, all at once."""
        return (self.score_NP.dtype, self.score_NP.device) == (self.penalty_KP.dtype, self.penalty_KP.device)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the scores of some images after others', ready for arithmetic."""
        count, prototypes = self.score_NP.shape
        size = count if self.is_ready else max(1, BLOCK // (prototypes * self.penalty_KP.element_size()))
        for first in range(0, count, size):
            rows = slice(first, min(first + size, count))
            yield rows, self.score_NP[rows].to(self.penalty_KP)

    def weighted(self, rows: slice, values: Tensor) -> Tensor:
        """Return values of some images, first dimension, times how much each of these counts."""
        if self.weight_N is None:
            return values
        return values * self.weight_N[rows].view(-1, *[1] * (values.ndim - 1))

    def proximal(self, weight_KP: Tensor, threshold_KP: Tensor) -> Tensor:
        """Return the allowed weights, soft-thresholded."""
        return self.allowed(shrink(weight_KP, threshold_KP))

    def allowed(self, weight_KP: Tensor) -> Tensor:
        """Return the nearest weights that are allowed."""
        return torch.where(self.own_KP, weight_KP.clamp_min(0), weight_KP) if self.own_positive else weight_KP

    def at(self, weight_KP: Tensor) -> Point:
        return Point(weight_KP, logits_of_scores(self.score_NP, weight_KP) if self.is_ready else None)


@dataclass(frozen=True)
class Point:
    """Weights, and the logits they give where the scores are all in memory; elsewhere these are computed again when
    they are needed, a block at a time."""

    weight_KP: Tensor
    logits_NK: Tensor | None

    @cached_property
    def prob_NK(self) -> Tensor | None:
        return None if self.logits_NK is None else self.logits_NK.softmax(1)

    def logits(self, rows: slice, score_bP: Tensor) -> Tensor:
        return logits_of_scores(score_bP, self.weight_KP) if self.logits_NK is None else self.logits_NK[rows]

    def probabilities(self, rows: slice, logits_bK: Tensor) -> Tensor:
        return logits_bK.softmax(1) if self.prob_NK is None else self.prob_NK[rows]

    def beyond(self, before: Point, carry: float) -> Point:
        """Return a point farther by this share of the way from the one before."""
        weight_KP = self.weight_KP + carry * (self.weight_KP - before.weight_KP)
        if self.logits_NK is None or before.logits_NK is None:
            return Point(weight_KP, None)
        return Point(weight_KP, self.logits_NK + carry * (self.logits_NK - before.logits_NK))


def make_problem(
    score_NP: Tensor,
    label_N: Tensor,
    class_P: Tensor,
    num_classes: int,
    lam: float,
    ridge: float,
    own_positive: bool = False,
    weight_N: Tensor | None = None,
    exclusive: bool = False,
) -> LastLayerProblem:
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
    penalty_KP = (~own_KP).to(dtype) * lam
    weight_N = None if weight_N is None else weight_N.to(penalty_KP)
    problem = LastLayerProblem(score_NP.detach(), label_N, own_KP, penalty_KP, ridge, own_positive, weight_N)
    if not all(bool(score_bP.isfinite().all()) for _, score_bP in problem.blocks()):
        raise UserError("the similarity scores hold NaN or infinity; check the network that made them")
    return replace(problem, ridge=ridge * commonness(problem)) if exclusive else problem


def commonness(problem: LastLayerProblem) -> Tensor:
    """Return how much less exclusive each prototype is than the most exclusive one of its class, 1 for that and for
    connections to other classes: K x P.

    A prototype is the more exclusive the less the mean score of any other class comes up to that of its own. One that
    its own class scores nothing on is not exclusive at all.
    """
    total_KP = problem.penalty_KP * 0
    for rows, score_bP in problem.blocks():
        total_KP += F.one_hot(problem.label_N[rows], len(total_KP)).to(score_bP).T @ score_bP
    mean_KP = total_KP / problem.label_N.bincount(minlength=len(total_KP)).clamp(min=1)[:, None]
    own_P, other_P = (mean_KP * problem.own_KP).sum(0), mean_KP.masked_fill(problem.own_KP, 0.0).amax(0)
    likeness_P = torch.where(own_P > 0, (other_P / own_P.clamp(min=1e-6)).clamp(0, 1), 1.0)
    exclusive_KP = problem.own_KP * (1 + EXCLUSIVE - likeness_P)
    return torch.where(problem.own_KP, exclusive_KP.amax(1, keepdim=True) / exclusive_KP, 1.0)


@contextmanager
def exact_matmul(device_type: str) -> Iterator[None]:
    """Switch off autograd, and multiply in true float32: TF32 and autocast round more than the tolerance allows."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def objective_of(problem: LastLayerProblem, point: Point) -> float:
    losses = [
        problem.weighted(rows, F.cross_entropy(point.logits(rows, score_bP), problem.label_N[rows], reduction="none"))
        for rows, score_bP in problem.blocks()
    ]
    loss_N, weight_KP = losses[0] if len(losses) == 1 else torch.cat(losses), point.weight_KP
    away_KP = weight_KP - problem.own_KP.to(weight_KP)
    penalty_K = (problem.penalty_KP * weight_KP.abs() + 0.5 * problem.ridge * away_KP.square()).sum(1)
    return float(wide(loss_N).mean() + wide(penalty_K).sum())


def accuracy_of(problem: LastLayerProblem, point: Point) -> float:
    right = [point.logits(rows, score_bP).argmax(1) == problem.label_N[rows] for rows, score_bP in problem.blocks()]
    return float(torch.cat(right).cpu().double().mean())


def data_gradient_of(problem: LastLayerProblem, point: Point) -> Tensor:
    """Return the gradient of the mean cross entropy."""
    total_KP = torch.zeros(())
    for number, (rows, score_bP) in enumerate(problem.blocks()):
        error_bK = point.probabilities(rows, point.logits(rows, score_bP)).clone()
        error_bK[torch.arange(len(error_bK)), problem.label_N[rows]] -= 1
        product_KP = problem.weighted(rows, error_bK).T @ score_bP
        total_KP = total_KP + product_KP if number else product_KP
    return total_KP / len(problem.label_N)


def gradient_of(problem: LastLayerProblem, point: Point) -> Tensor:
    """Return the gradient of the smooth terms."""
    weight_KP = point.weight_KP
    return data_gradient_of(problem, point) + problem.ridge * (weight_KP - problem.own_KP.to(weight_KP))


def residual_of(problem: LastLayerProblem, point: Point) -> float:
    """Return the largest entry, in magnitude, of the smallest subgradient of the objective: 0 at the minimiser only.

    With g the gradient of the smooth terms, an entry is g for own-class weights, g + lam sign(w) for other weights
    that are not zero, and the excess of |g| over lam (0 if there is none) for those that are. With `own_positive` it
    is min(g, 0) for own-class weights that are zero.
    """
    gradient_KP, weight_KP = gradient_of(problem, point), point.weight_KP
    at_zero_KP = shrink(gradient_KP, problem.penalty_KP)
    if problem.own_positive:  # where a weight may only grow, a gradient above zero holds it at zero
        at_zero_KP = torch.where(problem.own_KP, at_zero_KP.clamp_max(0), at_zero_KP)
    elsewhere_KP = gradient_KP + problem.penalty_KP * weight_KP.sign()
    return float(torch.where(weight_KP == 0, at_zero_KP, elsewhere_KP).abs().max())


def shrink(x: Tensor, by: Tensor) -> Tensor:
    """Soft-threshold x: the proximal operator of by * |x|, exactly zero for |x| <= by."""
    return x - torch.maximum(torch.minimum(x, by), -by)
