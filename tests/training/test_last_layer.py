"""The last-layer solver against a general-purpose optimiser, and the properties a user relies on."""

import numpy as np
import pytest
import torch
from helpers.last_layer import kkt_residual
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

from likethat.errors import UserError
from likethat.training.last_layer import objective, solve_last_layer, solve_path
from likethat.training.last_layer_problem import EXCLUSIVE, commonness
from likethat.training.last_layer_problem import make_problem as make_last_layer_problem

Problem = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


def make_problem(
    seed: int, images: int = 60, prototypes: tuple[int, ...] = (3, 3, 3), gap: float = 1.0, mean: float = 1.0
) -> Problem:
    """Positive scores with a common mean; an image scores higher, by `gap`, on the prototypes of its class."""
    rng = np.random.default_rng(seed)
    classes = np.repeat(np.arange(len(prototypes)), prototypes)
    labels = rng.integers(len(prototypes), size=images)
    scores = np.abs(mean + 0.5 * rng.normal(size=(images, len(classes))) + gap * (labels[:, None] == classes))
    return torch.tensor(scores), torch.tensor(labels), torch.tensor(classes), len(prototypes)


def duplicated_columns(seed: int) -> Problem:
    score_NP, label_N, class_P, num_classes = make_problem(seed)
    score_NP[:, 1] = score_NP[:, 0]  # same class
    score_NP[:, 4] = score_NP[:, 0]  # another class
    return score_NP, label_N, class_P, num_classes


def reference_minimum(problem: Problem, lam: float, ridge: float | np.ndarray, own_positive: bool = False) -> float:
    """The same objective written from the paper, w = u - v with u, v >= 0, and minimised by L-BFGS-B."""
    score, label, classes = (tensor.numpy() for tensor in problem[:3])
    num_classes, count = problem[3], len(label)
    own = classes[None] == np.arange(num_classes)[:, None]
    size = own.size

    def value_and_gradient(uv: np.ndarray) -> tuple[float, np.ndarray]:
        u, v = uv[:size].reshape(own.shape), uv[size:].reshape(own.shape)
        w = u - v
        logits = score @ w.T
        loss = -log_softmax(logits, axis=1)[np.arange(count), label].mean()
        smooth = (softmax(logits, axis=1) - np.eye(num_classes)[label]).T @ score / count + ridge * (w - own)
        value = loss + lam * (u + v)[~own].sum() + 0.5 * (ridge * (w - own) ** 2).sum()
        penalty = lam * ~own
        return value, np.concatenate([(smooth + penalty).ravel(), (-smooth + penalty).ravel()])

    best = minimize(
        value_and_gradient,
        np.concatenate([own.ravel() * 1.0, np.zeros(size)]),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, None)] * size + [(0, 0 if own_positive and mine else None) for mine in own.ravel()],
        options={"maxiter": 50_000, "maxfun": 100_000, "ftol": 1e-16, "gtol": 1e-10, "maxcor": 40},
    )
    return float(best.fun)


@pytest.mark.parametrize(
    ("problem", "lam", "ridge"),
    [
        (make_problem(0), 1e-2, 1e-3),
        (make_problem(1, gap=0.3), 1e-3, 1e-4),
        (make_problem(2, gap=8.0), 1e-3, 1e-4),  # separable
        (make_problem(3, prototypes=(1, 4, 2, 5)), 5e-3, 1e-3),
        (make_problem(4, prototypes=(2, 2)), 1e-2, 1e-3),
        (make_problem(5, prototypes=(1, 0)), 1e-2, 1e-3),  # one prototype, and a class with none
        (make_problem(6, images=1), 1e-2, 1e-2),
        (make_problem(7, mean=20.0), 1e-2, 1e-3),  # a mean that dwarfs the differences
        (make_problem(8), 0.0, 1e-2),
        (duplicated_columns(9), 1e-3, 1e-3),
    ],
)
def test_minimum_equals_that_of_a_general_solver(problem: Problem, lam: float, ridge: float) -> None:
    solution = solve_last_layer(*problem, lam=lam, ridge=ridge, tol=1e-8, max_iterations=5000)
    assert solution.kkt_residual <= 1e-8
    assert solution.objective == pytest.approx(reference_minimum(problem, lam, ridge), abs=1e-6)
    assert solution.objective == pytest.approx(
        objective(solution.weight_KP, *problem[:3], lam=lam, ridge=ridge), abs=1e-12
    )
    assert solution.accuracy == float(((problem[0] @ solution.weight_KP.T).argmax(1) == problem[1]).double().mean())


def against_their_class(seed: int) -> Problem:
    """Prototypes 0 and 4 score lower on images of their own class."""
    score_NP, label_N, class_P, num_classes = make_problem(seed)
    for prototype in (0, 4):
        score_NP[:, prototype] += 1.0 * (label_N != class_P[prototype])
    return score_NP, label_N, class_P, num_classes


@pytest.mark.parametrize(
    ("problem", "lam", "ridge"),
    [
        (make_problem(1, gap=0.3), 1e-3, 1e-4),
        (against_their_class(0), 1e-2, 1e-3),
        (against_their_class(1), 1e-3, 1e-4),
        (against_their_class(2), 100.0, 1e-3),  # no connections but to own classes
        (duplicated_columns(9), 1e-3, 1e-3),
    ],
)
def test_looking_like_a_class_never_speaks_against_it(problem: Problem, lam: float, ridge: float) -> None:
    terms = {"lam": lam, "ridge": ridge, "own_positive": True}
    own_KP = problem[2] == torch.arange(problem[3])[:, None]
    start_KP = torch.where(own_KP, -1.0, 0.5).double()  # one that is not allowed itself
    for start in (None, start_KP):
        solution = solve_last_layer(*problem, **terms, start_KP=start, tol=1e-8, max_iterations=5000)
        assert (solution.weight_KP[own_KP] >= 0).all()
        assert solution.kkt_residual == kkt_residual(solution.weight_KP, *problem[:3], **terms) <= 1e-8
        assert solution.objective == pytest.approx(reference_minimum(problem, lam, ridge, True), abs=1e-6)
    free = solve_last_layer(*problem, lam=lam, ridge=ridge, tol=1e-8, max_iterations=5000)
    assert (free.weight_KP[own_KP] < 0).any() == (solution.weight_KP[own_KP] == 0).any()
    assert solution.objective >= free.objective - 1e-9


def test_residual_is_the_smallest_subgradient_entry_by_entry() -> None:
    score_NP, label_N, class_P, num_classes = make_problem(0, prototypes=(2, 2, 2))
    lam, ridge = 0.02, 0.01
    weight_KP = torch.tensor([[1.5, 0.0, 0.3, 0.0, 0.0, -0.2], [0.0, -0.1, 1.0, 2.0, 0.0, 0.0], [0.0] * 6]).double()
    smooth_KP = weight_KP.clone().requires_grad_()
    own_KP = class_P == torch.arange(num_classes)[:, None]
    loss = torch.nn.functional.cross_entropy(score_NP @ smooth_KP.T, label_N)
    (loss + ridge / 2 * (smooth_KP - own_KP.double()).square().sum()).backward()
    worst = 0.0
    for k in range(num_classes):
        for j in range(len(class_P)):
            g, w = smooth_KP.grad[k, j].item(), weight_KP[k, j].item()
            if own_KP[k, j]:
                entry = g
            elif w == 0:
                entry = max(abs(g) - lam, 0)
            else:
                entry = g + lam * np.sign(w)
            worst = max(worst, abs(entry))
    assert kkt_residual(weight_KP, score_NP, label_N, class_P, lam=lam, ridge=ridge) == pytest.approx(worst, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    prototypes=st.lists(st.integers(1, 4), min_size=2, max_size=5).map(tuple),
    gap=st.floats(0, 5),
    log_lam=st.floats(-4, -1),
)
def test_nothing_near_or_at_the_start_is_better(
    seed: int, prototypes: tuple[int, ...], gap: float, log_lam: float
) -> None:
    problem = make_problem(seed, 40, prototypes, gap)
    data, lam, ridge = problem[:3], 10**log_lam, 1e-3
    start_KP = torch.where(problem[2] == torch.arange(problem[3])[:, None], 1.0, -0.5).double()
    solution = solve_last_layer(*problem, lam=lam, ridge=ridge, start_KP=start_KP, tol=1e-7, max_iterations=5000)
    assert solution.kkt_residual <= 1e-7
    assert kkt_residual(solution.weight_KP, *data, lam=lam, ridge=ridge) == pytest.approx(solution.kkt_residual)
    assert solution.objective <= objective(start_KP, *data, lam=lam, ridge=ridge) + 1e-9
    generator = torch.Generator().manual_seed(seed)
    for size in (1e-3, 1e-1, 1.0):
        noise_KP = torch.randn(start_KP.shape, generator=generator, dtype=torch.float64)
        near_KP = solution.weight_KP + size * noise_KP
        assert solution.objective <= objective(near_KP, *data, lam=lam, ridge=ridge) + 1e-9


def test_a_huge_penalty_zeroes_exactly_the_other_classes() -> None:
    problem = make_problem(0)
    own_KP = problem[2] == torch.arange(3)[:, None]
    solution = solve_last_layer(*problem, lam=100.0, ridge=1e-5)
    assert (solution.weight_KP[~own_KP] == 0).all()
    assert (solution.weight_KP[own_KP].abs() > 0.1).all()
    assert solution.nonzero_negative == 0


def test_zeros_are_exact_and_counted() -> None:
    problem = make_problem(1, images=200, prototypes=(4,) * 5, gap=0.3)
    solution = solve_last_layer(*problem, lam=1e-2, ridge=1e-5)
    others = solution.weight_KP[problem[2] != torch.arange(5)[:, None]]
    assert solution.nonzero_negative == int((others != 0).sum())
    assert 0 < solution.nonzero_negative < others.numel() // 2
    assert others[others != 0].abs().min() > 1e-5  # no dust in place of zeros


def test_duplicated_prototypes_share_their_weight() -> None:
    problem = duplicated_columns(0)
    weight_KP = solve_last_layer(*problem, lam=1e-3, ridge=1e-3, tol=1e-9, max_iterations=5000).weight_KP
    torch.testing.assert_close(weight_KP[:, 0], weight_KP[:, 1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("order", [1, -1])
def test_path_equals_cold_solves(order: int) -> None:
    problem = make_problem(2, images=100, prototypes=(3,) * 4)
    lams = [1e-1, 1e-2, 1e-3, 1e-4][::order]
    path = solve_path(*problem, lams, ridge=1e-3, tol=1e-9, max_iterations=5000)
    for lam, warm in zip(lams, path, strict=True):
        cold = solve_last_layer(*problem, lam=lam, ridge=1e-3, tol=1e-9, max_iterations=5000)
        torch.testing.assert_close(warm.weight_KP, cold.weight_KP, atol=1e-5, rtol=0)
        assert warm.nonzero_negative == cold.nonzero_negative
    sparsity = [solution.nonzero_negative for solution in path][::order]
    assert sparsity[0] < sparsity[-1]


def test_warm_start_at_the_minimum_costs_nothing() -> None:
    problem = make_problem(3)
    solution = solve_last_layer(*problem, lam=1e-4, ridge=1e-5)
    again = solve_last_layer(*problem, lam=1e-4, ridge=1e-5, start_KP=solution.weight_KP)
    assert again.iterations == 0
    assert torch.equal(again.weight_KP, solution.weight_KP)


def test_float32_and_same_bits_twice() -> None:
    """Half precision and float32 scores are solved in float32, to the default tolerance, with the same bits twice."""
    score_NP, label_N, class_P, num_classes = make_problem(4, images=500, prototypes=(5,) * 10)
    first, second = (
        solve_last_layer(score_NP.float(), label_N, class_P, num_classes, lam=1e-4, ridge=1e-5) for _ in range(2)
    )
    assert first.weight_KP.dtype == torch.float32
    assert first.kkt_residual <= 1e-5
    assert torch.equal(first.weight_KP, second.weight_KP)
    exact = solve_last_layer(
        score_NP, label_N, class_P, num_classes, lam=1e-4, ridge=1e-5, tol=1e-8, max_iterations=5000
    )
    assert first.objective == pytest.approx(exact.objective, abs=1e-3)
    half = solve_last_layer(score_NP.half(), label_N, class_P, num_classes, lam=1e-4, ridge=1e-5)
    assert half.weight_KP.dtype == torch.float32
    assert half.kkt_residual <= 1e-5


@pytest.mark.parametrize("mean", [0.5, 5.0])
@pytest.mark.parametrize("gap", [0.2, 3.0])
@pytest.mark.parametrize("ridge", [1e-6, 1e-4])
def test_float32_reaches_the_default_tolerance(mean: float, gap: float, ridge: float) -> None:
    """A large common mean and near-separable classes are what ruins the conditioning."""
    score_NP, label_N, class_P, num_classes = make_problem(7, 600, (5,) * 20, gap, mean)
    solution = solve_last_layer(score_NP.float(), label_N, class_P, num_classes, lam=1e-4, ridge=ridge)
    assert solution.kkt_residual <= 1e-5


def test_lower_matmul_precision_elsewhere_is_set_aside_and_restored() -> None:
    score_NP, label_N, class_P, num_classes = make_problem(5, images=300, prototypes=(4,) * 6)
    expected = solve_last_layer(score_NP.float(), label_N, class_P, num_classes, lam=1e-4, ridge=1e-5)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = solve_last_layer(score_NP.float(), label_N, class_P, num_classes, lam=1e-4, ridge=1e-5)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(found.weight_KP, expected.weight_KP)


def test_stopping_early_is_reported() -> None:
    problem = make_problem(6, images=200, prototypes=(4,) * 5)
    solution = solve_last_layer(*problem, lam=1e-4, ridge=1e-5, max_iterations=2)
    assert solution.iterations == 2
    assert solution.kkt_residual > 1e-5
    assert solution.kkt_residual == pytest.approx(kkt_residual(solution.weight_KP, *problem[:3], lam=1e-4, ridge=1e-5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score_NP": torch.ones(5)}, "one row and label an image"),
        ({"label_N": torch.zeros(3, dtype=torch.int64)}, "3 labels and 9 prototype classes"),
        ({"label_N": torch.full((60,), 3)}, "labels must lie in 0..2"),
        ({"class_P": torch.full((9,), -1)}, "prototype classes must lie in 0..2"),
        ({"score_NP": torch.full((60, 9), torch.nan)}, "NaN"),
        ({"ridge": 0.0}, "ridge > 0"),
        ({"lam": -1.0}, "lam >= 0"),
        ({"start_KP": torch.zeros(2, 9)}, r"\(3, 9\)"),
    ],
)
def test_mistakes_are_named(change: dict, message: str) -> None:
    names = ("score_NP", "label_N", "class_P", "num_classes")
    arguments = dict(zip(names, make_problem(0), strict=True)) | {"lam": 1e-4, "ridge": 1e-5} | change
    with pytest.raises(UserError, match=message):
        solve_last_layer(**arguments)


@pytest.mark.parametrize("own_positive", [False, True])
def test_what_another_class_looks_like_too_is_pulled_more(own_positive: bool) -> None:
    """The ridge of an own connection is that of the most exclusive prototype of its class, as much larger as this one
    is less exclusive."""
    problem = score_NP, label_N, class_P, _ = make_problem(5, prototypes=(3, 1, 2), gap=0.6)
    score_NP[label_N == 1, 0] += 1.0  # more than its own class
    ridge = np.full((3, 6), 1e-3)
    for label in range(3):
        mean = {k: score_NP[label_N == k].mean(0).tolist() for k in range(3)}
        of_class = [p for p in range(6) if class_P[p] == label]
        likeness = {p: max(mean[k][p] for k in range(3) if k != label) / mean[label][p] for p in of_class}
        exclusive = {p: EXCLUSIVE + 1 - min(1.0, likeness[p]) for p in of_class}
        for p in of_class:
            ridge[label, p] *= max(exclusive.values()) / exclusive[p]
    terms = {"lam": 1e-2, "own_positive": own_positive}
    solution = solve_last_layer(*problem, ridge=1e-3, exclusive=True, tol=1e-8, max_iterations=5000, **terms)
    assert ridge.max() > 5e-3
    assert solution.objective == pytest.approx(reference_minimum(problem, ridge=ridge, **terms), abs=1e-8)


def test_a_prototype_that_scores_nothing_is_not_exclusive() -> None:
    score_NP, label_N, class_P, classes = make_problem(6, prototypes=(2, 1))
    score_NP[:, 1] = 0
    problem = make_last_layer_problem(score_NP, label_N, class_P, classes, 1e-2, 1e-3)
    common_KP = commonness(problem)
    assert common_KP[0, 0] == 1, "the other one of its class is"
    assert common_KP[0, 1] > 1
