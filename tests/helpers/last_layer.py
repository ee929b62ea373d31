"""How far weights of the last layer are from optimal, for tests."""

from __future__ import annotations

from torch import Tensor

from likethat.training.last_layer_problem import exact_matmul, make_problem, residual_of


def kkt_residual(
    weight_KP: Tensor,
    score_NP: Tensor,
    label_N: Tensor,
    class_P: Tensor,
    *,
    lam: float,
    ridge: float,
    own_positive: bool = False,
    weight_N: Tensor | None = None,
) -> float:
    """Return the residual that the solver brings down, at the given weights."""
    problem = make_problem(score_NP, label_N, class_P, len(weight_KP), lam, ridge, own_positive, weight_N)
    with exact_matmul(problem.penalty_KP.device.type):
        return residual_of(problem, problem.at(weight_KP.to(problem.penalty_KP)))
