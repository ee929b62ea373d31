"""The convex last layer, solved to optimality from cached similarity scores instead of by passes over the images.

Shapes: N images, P prototypes, K classes. With own[k, j] true where prototype j belongs to class k, it minimises

    mean_i CrossEntropy(w score_i, y_i)  +  lam * sum_{not own} |w_kj|  +  ridge / 2 * sum_kj (w_kj - own_kj)^2

The first two terms are the paper's. They alone have no minimiser when the classes can be separated (the own-class
weights are free, so they run away) and several when two prototypes sit on the same patch. The third, a pull towards
the paper's initial +1 for own classes and to 0 for the others, makes the minimiser exist and be the only one.
With `own_positive`, own-class weights are held at 0 or above: looking like a class never speaks against it.
With `exclusive`, the ridge is larger for own-class weights of prototypes that another class looks like, too (see
`commonness`), so that the points come from what tells the class from others.

Method: accelerated proximal gradient with restarts. Scores are positive and share a large mean, so plain steps crawl;
each step is taken in a metric that models the Hessian as a diagonal plus that mean, coupled across the classes:

    metric = diag(D) + U C U^T,   U = blockdiag_k(mean_k),   C = mean_i (diag(p_i) - p_i p_i^T)

where mean_k averages the scores under the weights p_ik (1 - p_ik), and D is their variance around it.
The step in that metric comes down to K unknowns (see `_proximal_step`), and soft-thresholding leaves exact zeros, as
does clipping own-class weights at 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from likethat.config.settings import TrainConfig
from likethat.errors import UserError
from likethat.runtime import wide
from likethat.training.last_layer_problem import (
    LastLayerProblem,
    Point,
    accuracy_of,
    exact_matmul,
    gradient_of,
    make_problem,
    objective_of,
    residual_of,
)

_REFRESH = 20  # iterations between two metrics, after shorter gaps of 2, 4, 8 and 16 at the start
_MAX_SCALE = 1e12  # a step this much shorter than the metric suggests is lost in rounding


@dataclass(frozen=True)
class LastLayerSolution:
    """What the solver reached. `kkt_residual` above the tolerance asked for means it stopped early."""

    weight_KP: Tensor
    objective: float
    kkt_residual: float
    iterations: int
    nonzero_negative: int  # connections to classes other than the prototype's own that are not exactly zero
    accuracy: float  # on the images it was solved for


@dataclass(frozen=True)
class _Metric:
    diagonal_KP: Tensor
    mean_KP: Tensor
    coupling_KK: Tensor  # in `wide` precision


def terms_of(settings: TrainConfig) -> dict[str, Any]:
    """Return what a run's settings say of the objective besides lambda, as arguments of `solve_last_layer`."""
    return {"ridge": settings.ridge, "own_positive": settings.own_positive, "exclusive": settings.exclusive}


def solve_last_layer(
    score_NP: Tensor,
    label_N: Tensor,
    class_P: Tensor,
    num_classes: int,
    *,
    lam: float,
    ridge: float,
    own_positive: bool = False,
    weight_N: Tensor | None = None,
    exclusive: bool = False,
    start_KP: Tensor | None = None,
    tol: float = 1e-5,
    max_iterations: int = 1000,
) -> LastLayerSolution:
    """Minimise the objective above until `kkt_residual` is at most `tol`, on the device of the scores (of the labels,
    where the scores are in the CPU's memory or in a file).

    Works in float64 for float64 scores, else in float32; scores of less precision are converted a block at
    a time, so that they may be larger than memory. Starts from `start_KP`, or from the own-class indicator.
    float32 can stop short where the mean of the scores is tens of times their spread: look at the residual.
    `weight_N` says how much each image counts, 1 on average.
    """
    problem = make_problem(score_NP, label_N, class_P, num_classes, lam, ridge, own_positive, weight_N, exclusive)
    start_KP = problem.own_KP if start_KP is None else start_KP
    if start_KP.shape != problem.own_KP.shape:
        raise UserError(f"start weights have shape {tuple(start_KP.shape)}; give {tuple(problem.own_KP.shape)}")
    with exact_matmul(problem.penalty_KP.device.type):
        return _solve(problem, problem.allowed(start_KP.to(problem.penalty_KP)), tol, max_iterations)


def solve_path(
    score_NP: Tensor,
    label_N: Tensor,
    class_P: Tensor,
    num_classes: int,
    lams: Sequence[float],
    **settings: Any,
) -> list[LastLayerSolution]:
    """Return one solution for each lam in the order given, each starting from the one before it. `settings` are the
    other arguments of `solve_last_layer`."""
    data = (score_NP, label_N, class_P, num_classes)
    path: list[LastLayerSolution] = []
    for lam in lams:
        start_KP = path[-1].weight_KP if path else None
        path.append(solve_last_layer(*data, lam=lam, start_KP=start_KP, **settings))
    return path


def of_views(weight_N: Tensor | None, views: int) -> Tensor | None:
    """Return the weights of all views of images: all images in one view, then in the next."""
    return None if weight_N is None else weight_N.repeat(views)


def objective(
    weight_KP: Tensor, score_NP: Tensor, label_N: Tensor, class_P: Tensor, *, lam: float, ridge: float
) -> float:
    """Return the value that `solve_last_layer` minimises, at the given weights."""
    problem = make_problem(score_NP, label_N, class_P, len(weight_KP), lam, ridge)
    with exact_matmul(problem.penalty_KP.device.type):
        return objective_of(problem, problem.at(weight_KP.to(problem.penalty_KP)))


def _metric(problem: LastLayerProblem, point: Point) -> _Metric:
    count = len(problem.label_N)
    sums: list[Tensor] = []
    for rows, score_bP in problem.blocks():
        prob_bK = point.probabilities(rows, point.logits(rows, score_bP))
        spread_Kb = (problem.weighted(rows, prob_bK * (1 - prob_bK)) / count).T
        new = (
            spread_Kb.sum(1, keepdim=True),
            spread_Kb @ score_bP,
            spread_Kb @ score_bP.square(),
            prob_bK.T @ problem.weighted(rows, prob_bK),
        )
        sums = [one + other for one, other in zip(sums, new, strict=True)] if sums else [*new]
    mass_K1, total_KP, square_KP, product_KK = sums
    mass_K1 = mass_K1.clamp_min(1e-9)
    mean_KP = total_KP / mass_K1
    # The floor keeps the metric positive where rounding eats the variance (a prototype with almost constant scores).
    variance_KP = torch.maximum(square_KP - mass_K1 * mean_KP.square(), 1e-2 * square_KP) + 1e-8
    # diag(p) - p p^T as a graph Laplacian (rows sum to zero), which rounding cannot make indefinite.
    edge_KK = wide(product_KK / count).fill_diagonal_(0)
    return _Metric(variance_KP, mean_KP, edge_KK.sum(1).diag() - edge_KK)


def _proximal_step(
    problem: LastLayerProblem,
    metric: _Metric,
    scale: float,
    point_KP: Tensor,
    gradient_KP: Tensor,
    shift_K: Tensor,
    tol: float,
) -> Tensor:
    """Return point + d for the minimiser d of  gradient.d + d.(scale * metric + ridge).d / 2 + penalty |point + d|.

    Given the K numbers shift_k = mean_k.d_k the entries separate and are soft-thresholded; the shift itself solves
    K monotone, piecewise linear equations: Newton's method, with a line search on the convex function behind them.
    `shift_K` is a first guess. Stops when the error in the optimality conditions is at most `tol`.
    """
    inverse_KP = 1 / (scale * metric.diagonal_KP + problem.ridge)
    threshold_KP = problem.penalty_KP * inverse_KP
    centre_KP = point_KP - gradient_KP * inverse_KP
    pull_KP = metric.mean_KP * inverse_KP
    coupling_KK = scale * metric.coupling_KK
    mean_max = float(metric.mean_KP.abs().max())
    eye_KK = torch.eye(len(point_KP)).to(coupling_KK)

    def respond(shift_K: Tensor) -> tuple[Tensor, Tensor]:
        force_K = (coupling_KK @ shift_K).to(point_KP)
        weight_KP = problem.proximal(centre_KP - pull_KP * force_K[:, None], threshold_KP)
        return weight_KP, shift_K - wide((metric.mean_KP * (weight_KP - point_KP)).sum(1))

    weight_KP, error_K = respond(shift_K)
    previous, strikes = math.inf, 0
    for _ in range(20):
        force_K = coupling_KK @ error_K
        worst = float(force_K.abs().max()) * mean_max
        strikes += worst > 0.5 * previous
        if worst <= tol or strikes == 2:
            break
        previous = worst
        # Newton's direction -(I + diag(slope) coupling)^-1 error, through a symmetric system.
        root_K = wide((metric.mean_KP * pull_KP * (weight_KP != 0)).sum(1)).sqrt()
        factor_KK = torch.linalg.cholesky_ex(eye_KK + root_K[:, None] * coupling_KK * root_K).L
        direction_K = root_K * torch.cholesky_solve((root_K * force_K)[:, None], factor_KK)[:, 0] - error_K
        descent, length = float(force_K @ direction_K), 1.0
        if descent >= 0:  # rounding: as good as it gets
            break
        for _ in range(8):
            weight_KP, error_K = respond(shift_K + length * direction_K)
            ascent = float((coupling_KK @ error_K) @ direction_K)
            if ascent <= -0.5 * descent:
                break
            length *= descent / (descent - ascent)
        shift_K = shift_K + length * direction_K
    return weight_KP


def _solve(problem: LastLayerProblem, weight_KP: Tensor, tol: float, max_iterations: int) -> LastLayerSolution:
    best = point = problem.at(weight_KP)  # `point` is where momentum has carried us
    value, residual = objective_of(problem, best), residual_of(problem, best)
    shift_K = wide(torch.zeros_like(weight_KP[:, 0]))
    step_residual, momentum, scale = residual, 1.0, 1.0
    refresh_at, refresh_gap = 0, 2
    iteration, epsilon = 0, torch.finfo(weight_KP.dtype).eps
    while residual > tol and iteration < max_iterations and scale < _MAX_SCALE:
        gradient_KP = gradient_of(problem, point)
        step_tol = max(0.1 * tol, 1e-3 * step_residual)
        if iteration == refresh_at:
            metric, scale = _metric(problem, point), min(scale, 30.0)  # an old metric's scale says little now
            refresh_at, refresh_gap = iteration + refresh_gap, min(2 * refresh_gap, _REFRESH)
        iteration += 1
        while scale < _MAX_SCALE:
            new = problem.at(_proximal_step(problem, metric, scale, point.weight_KP, gradient_KP, shift_K, step_tol))
            step_KP = new.weight_KP - point.weight_KP
            shift_K = wide((metric.mean_KP * step_KP).sum(1))
            force_K = metric.coupling_KK @ shift_K
            model = 0.5 * float((metric.diagonal_KP * step_KP.square()).sum()) + 0.5 * float(shift_K @ force_K)
            change, rounding = _curvature(problem, point, new)
            if change <= scale * model + epsilon * rounding:
                break
            scale *= min(max(1.5, change / max(scale * model, 1e-30)), 10.0) if math.isfinite(change) else 10.0
        new_value = objective_of(problem, new)
        if new_value > value + 10 * epsilon * abs(value):
            # Momentum, or a step spoilt by rounding, led uphill: go back, and from there take shorter steps.
            scale = scale if momentum > 1 else 10 * scale
            momentum, point = 1.0, best
            continue
        # A subgradient at `new`, but for the change of the gradient since `point`.
        metric_step_KP = metric.diagonal_KP * step_KP + metric.mean_KP * force_K[:, None].to(step_KP)
        pseudo_KP = -(scale * metric_step_KP + problem.ridge * step_KP)
        if float((pseudo_KP * (new.weight_KP - best.weight_KP)).sum()) > 0:  # momentum points uphill: restart it
            momentum, point = 1.0, new
        else:
            next_momentum = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            carry, momentum = (momentum - 1) / next_momentum, next_momentum
            point = new.beyond(best, carry)
        best, value = new, new_value
        scale = max(0.9 * scale, min(scale, 1.2 * change / max(model, 1e-30)))
        step_residual = float(pseudo_KP.abs().max())
        if step_residual <= tol:
            residual = residual_of(problem, best)
    others = int(((best.weight_KP != 0) & ~problem.own_KP).sum())
    accuracy = accuracy_of(problem, best)
    return LastLayerSolution(best.weight_KP, value, residual_of(problem, best), iteration, others, accuracy)


def _curvature(problem: LastLayerProblem, point: Point, new: Point) -> tuple[float, float]:
    """Return how far the mean cross entropy rises above its tangent between two points, and the size of its terms."""
    rise = size = 0.0
    for rows, score_bP in problem.blocks():
        logits_bK = point.logits(rows, score_bP)
        prob_bK, move_bK = point.probabilities(rows, logits_bK), new.logits(rows, score_bP) - logits_bK
        # log sum_k p_k exp(move_k - mean move): unlike a difference of two losses, free of cancellation.
        centred_bK = move_bK - (prob_bK * move_bK).sum(1, keepdim=True)
        share = len(score_bP) / len(problem.label_N)
        rise_b = torch.log1p((prob_bK * torch.expm1(centred_bK)).sum(1))
        rise += share * float(problem.weighted(rows, rise_b).mean())
        size += share * float(problem.weighted(rows, (prob_bK * centred_bK.abs()).sum(1)).mean())
    return rise, size
