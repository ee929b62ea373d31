"""Certificates of the projection: no certified prediction may change, and no bound may be looser than it says."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from helpers.tiny import tiny_model
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from likethat.explaining.certificate import (
    Certificate,
    ImageCertificate,
    Move,
    Scores,
    Theorem,
    Verdict,
    apply_theorem,
    best_delta,
    compare,
    delta_max,
    feasible_delta,
    judge,
    least_lead,
    why_theorem_does_not_apply,
)
from likethat.models.prototypes import EPSILON, SIMILARITIES

SEEDS = st.integers(0, 2**32 - 1)
EXAMPLES = settings(max_examples=300, deadline=None)


@dataclass(frozen=True)
class Case:
    """One image of class 0 and the prototypes of all classes, as the theorem sees them."""

    patch_SD: Tensor
    move: Move
    own_KP: Tensor
    per_class: int

    @property
    def scores(self) -> Scores:
        return compare(self.patch_SD[None], self.move)

    @property
    def theorem(self) -> Theorem:
        (theorem,) = apply_theorem(self.scores, self.move, self.own_KP, torch.tensor([0]), self.per_class)
        return theorem


def logits_of(case: Case, prototype_PD: Tensor) -> list[float]:
    """The logits under (A4), number by number."""
    logits = [0.0] * len(case.own_KP)
    for number, prototype_D in enumerate(prototype_PD.tolist()):
        squares = [sum((x - y) ** 2 for x, y in zip(patch_D, prototype_D, strict=True)) for patch_D in case.patch_SD]
        least = float(min(squares))
        logits[number // case.per_class] += math.log((least + 1) / (least + EPSILON))
    return logits


def make_case(
    seed: int,
    classes: int,
    per_class: int,
    patches: int,
    near: float,
    far: float,
    step: float,
    spiteful: bool,
    spread: float = 1.0,
) -> Case:
    """Prototypes of class 0 lie about `near` a patch of the image, the others about `far` from it. Every one moves by
    `step` of what (A2) could allow; `spiteful` moves go the way that hurts class 0 most."""
    draw = torch.Generator().manual_seed(seed)

    def directions(count: int) -> Tensor:
        vector = torch.randn(count, 6, generator=draw, dtype=torch.float64)
        return vector / vector.norm(dim=1, keepdim=True)

    patch_SD = spread * torch.randn(patches, 6, generator=draw, dtype=torch.float64)
    count = classes * per_class
    own_KP = torch.eye(classes, dtype=torch.float64).repeat_interleave(per_class, 1)
    is_own_P = own_KP[0].bool()
    reach_P1 = torch.where(is_own_P, near, far)[:, None] * (0.5 + torch.rand(count, 1, generator=draw))
    before_PD = patch_SD[torch.randint(patches, (count,), generator=draw)] + reach_P1 * directions(count)
    distance_PS = torch.cdist(before_PD, patch_SD)
    nearest_P, index_P = distance_PS.min(1)
    way_PD = directions(count)
    if spiteful:
        away_PD = before_PD - patch_SD[index_P]
        way_PD = torch.where(is_own_P[:, None], 1.0, -1.0) * away_PD / away_PD.norm(dim=1, keepdim=True)
    length_P = step * torch.where(is_own_P, 0.41 * nearest_P, (0.21 * nearest_P - math.sqrt(EPSILON)).clamp(min=0))
    after_PD = before_PD + length_P[:, None] * way_PD
    return Case(patch_SD, Move(before_PD, after_PD, SIMILARITIES["log"]), own_KP, per_class)


cases = st.builds(
    make_case,
    seed=SEEDS,
    classes=st.integers(2, 4),
    per_class=st.integers(1, 3),
    patches=st.integers(1, 5),
    near=st.floats(0.01, 0.9),
    far=st.floats(0.1, 20),
    step=st.floats(0, 1.1),
    spiteful=st.booleans(),
    spread=st.floats(0.01, 1),
)


@EXAMPLES
@given(cases)
def test_no_prediction_that_the_theorem_certifies_changes(case: Case) -> None:
    theorem = case.theorem
    event(f"certified: {theorem.certified}")
    before, after = logits_of(case, case.move.before_PD), logits_of(case, case.move.after_PD)
    assert theorem.correct == (before.index(max(before)) == 0)
    nearest = [
        torch.cdist(case.patch_SD, v_PD).argmin(0).tolist() for v_PD in (case.move.before_PD, case.move.after_PD)
    ]
    assert theorem.nearest_kept == (nearest[0] == nearest[1])
    event(f"(A1): {theorem.nearest_kept}")
    top, second = sorted(before)[:-3:-1]
    assert theorem.margin == pytest.approx(top - second, abs=1e-9)
    if theorem.covered:
        assert theorem.delta_max is not None
        assert before[0] - after[0] <= theorem.delta_max
        assert max(new - old for new, old in zip(after[1:], before[1:], strict=True)) <= theorem.delta_max
    (a4,) = judge(case.scores, case.own_KP)
    if theorem.certified:
        assert all(after[0] > other for other in after[1:])
        assert a4.certified, "the bound must certify all that the theorem does"
    if theorem.correct and theorem.delta_max is not None:
        # Even without (A1), the theorem allows for twice what can happen: class 0 loses at most m' log(1 + delta), the
        # others gain at most m' log(2 - delta), which together is its delta_max.
        assert a4.bound >= theorem.margin - theorem.delta_max - 1e-9


def test_the_hunt_finds_certified_cases_and_changed_predictions() -> None:
    """Else the test above would prove nothing."""
    small = [make_case(seed, 3, 2, 4, near=0.1, far=8, step=0.5, spiteful=True).theorem for seed in range(100)]
    assert sum(theorem.certified for theorem in small) >= 50
    large = [make_case(seed, 3, 2, 4, near=0.8, far=1, step=4, spiteful=True) for seed in range(100)]
    right = [case for case in large if case.theorem.correct]
    changed = [logits_of(case, case.move.after_PD) for case in right]
    assert sum(logits.index(max(logits)) != 0 for logits in changed) >= 30


def satisfies_a2(case: Case, delta: float, slack: float = 0.0) -> bool:
    """(A2) as the paper has it."""
    theta = min(math.sqrt(1 + delta) - 1, 1 - 1 / math.sqrt(2 - delta))
    distance_PS = torch.cdist(case.move.before_PD, case.patch_SD)
    rows = zip(
        (case.move.after_PD - case.move.before_PD).norm(dim=1).tolist(),
        distance_PS.amin(1).tolist(),
        case.own_KP[0].tolist(),
        strict=True,
    )
    for moved, near, own in rows:
        if own:
            holds = moved <= (math.sqrt(1 + delta) - 1) * near + slack and near <= math.sqrt(1 - delta) + slack
        else:
            holds = moved <= theta * near - math.sqrt(EPSILON) + slack
        if not holds:
            return False
    return True


@settings(max_examples=100, deadline=None)
@given(cases)
def test_delta_is_the_best_of_a_fine_grid(case: Case) -> None:
    theorem, steps = case.theorem, 400
    event(f"some delta: {theorem.delta is not None}")
    grid = [delta for delta in (number / steps for number in range(1, steps)) if satisfies_a2(case, delta)]
    if theorem.delta is not None:
        assert 0 < theorem.delta < 1
        assert theorem.delta_max == delta_max(theorem.delta, case.per_class)
        assert satisfies_a2(case, theorem.delta, slack=1e-9)
    for delta in grid:
        assert theorem.delta_max is not None, f"delta {delta} is feasible"
        assert theorem.delta_max <= case.per_class * math.log((1 + delta) * (2 - delta)) + 1e-9
    near_BP = torch.cdist(case.move.before_PD, case.patch_SD).amin(1)[None]
    moved_P = (case.move.after_PD - case.move.before_PD).norm(dim=1)
    low_B, high_B = feasible_delta(near_BP, moved_P, case.own_KP[:1].bool())
    low, high = float(low_B), float(high_B)
    if high - low > 2 / steps:
        assert grid[0] - low <= 1.01 / steps
        assert high - grid[-1] <= 1.01 / steps
    else:
        assert len(grid) <= 3


def test_delta_by_hand() -> None:
    """Own prototype: moved 0.1 at distance 0.5; other: moved 0.49 at distance 5, so t = 0.2 and 0.1."""
    near_BP, moved_P = torch.tensor([[0.5, 5.0]], dtype=torch.float64), torch.tensor([0.1, 0.49], dtype=torch.float64)
    low_B, high_B = feasible_delta(near_BP, moved_P, torch.tensor([[True, False]]))
    assert float(low_B) == pytest.approx(1.2**2 - 1)
    assert float(high_B) == pytest.approx(min(1 - 0.25, 2 - 1 / 0.9**2))
    assert best_delta(0.44, 0.75) == 0.75
    assert best_delta(0.2, 0.75) == 0.2
    assert best_delta(0.76, 0.75) is None
    assert delta_max(0.75, 10) == pytest.approx(10 * math.log(1.75 * 1.25))


def test_a_prototype_on_the_patch_itself() -> None:
    own_BP = torch.tensor([[True, False]])
    near_BP = torch.tensor([[0.0, 5.0]], dtype=torch.float64)
    low_B, high_B = feasible_delta(near_BP, torch.zeros(2, dtype=torch.float64), own_BP)
    assert best_delta(float(low_B), float(high_B)) is not None, "it did not move, so any delta will do"
    low_B, high_B = feasible_delta(near_BP, torch.tensor([1e-3, 0.0], dtype=torch.float64), own_BP)
    assert best_delta(float(low_B), float(high_B)) is None
    low_B, high_B = feasible_delta(near_BP.flip(1), torch.zeros(2, dtype=torch.float64), own_BP)
    assert best_delta(float(low_B), float(high_B)) is None, "sqrt(eps) is more than no distance at all"


def random_move(seed: int, similarity: str, size: float, images: int = 3) -> tuple[Tensor, Move]:
    draw = torch.Generator().manual_seed(seed)
    patch_BSD = torch.randn(images, 4, 5, generator=draw, dtype=torch.float64)
    before_PD = torch.randn(6, 5, generator=draw, dtype=torch.float64)
    after_PD = before_PD + size * torch.randn(6, 5, generator=draw, dtype=torch.float64)
    if similarity == "cosine":
        patch_BSD = torch.nn.functional.normalize(patch_BSD, dim=2)
        before_PD, after_PD = (v / v.norm(dim=1, keepdim=True).clamp(min=1) for v in (before_PD, after_PD))
    return patch_BSD, Move(before_PD, after_PD, SIMILARITIES[similarity])


def slow_scores(patch_BSD: Tensor, prototype_PD: Tensor, similarity: str) -> Tensor:
    """The paper's formula on explicit differences; for the cosine similarity, products."""
    if similarity == "cosine":
        return (patch_BSD[:, :, None] * prototype_PD).sum(3).amax(1).clamp(min=0)
    square_BSP = (patch_BSD[:, :, None] - prototype_PD).square().sum(3)
    if similarity == "linear":
        return (-square_BSP).amax(1)
    return ((square_BSP + 1) / (square_BSP + EPSILON)).log().amax(1)


@EXAMPLES
@given(SEEDS, st.sampled_from(sorted(SIMILARITIES)), st.floats(0, 2))
def test_scores_lie_in_their_range_and_certified_predictions_stay(seed: int, similarity: str, size: float) -> None:
    patch_BSD, move = random_move(seed, similarity, size)
    scores = compare(patch_BSD, move)
    torch.testing.assert_close(scores.before_BP, slow_scores(patch_BSD, move.before_PD, similarity))
    after_BP = slow_scores(patch_BSD, move.after_PD, similarity)
    torch.testing.assert_close(scores.after_BP, after_BP)
    assert (after_BP >= scores.low_BP - 1e-7).all()
    assert (after_BP <= scores.high_BP + 1e-7).all()
    weight_KP = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits_BK = after_BP @ weight_KP.T
    for number, verdict in enumerate(judge(scores, weight_KP)):
        event(f"{similarity} certified: {verdict.certified}")
        others_K = [float(logits_BK[number, k]) for k in range(3) if k != verdict.before]
        assert verdict.bound <= float(logits_BK[number, verdict.before]) - max(others_K) + 1e-6
        assert not verdict.refuted


@EXAMPLES
@given(SEEDS, st.sampled_from(sorted(SIMILARITIES)), st.floats(0.01, 0.9), st.sampled_from([-1, 1]))
def test_the_range_is_reached(seed: int, similarity: str, size: float, sign: int) -> None:
    """With a single patch there is a move of that size that takes the score to either end."""
    patch_BSD, move = random_move(seed, similarity, size, images=1)
    patch_D, before_D = patch_BSD[0, 0], move.before_PD[0]
    away_D = patch_D - before_D
    after_D = before_D + sign * min(size, float(away_D.norm())) * away_D / away_D.norm()
    if similarity == "cosine":
        aside_D = patch_D - before_D * (patch_D @ before_D) / (before_D @ before_D)
        after_D = 0.7 * before_D + sign * size * aside_D
    scores = compare(patch_D[None, None], Move(before_D[None], after_D[None], move.similarity))
    reached_BP = scores.high_BP if sign > 0 else scores.low_BP
    torch.testing.assert_close(scores.after_BP, reached_BP, rtol=1e-6, atol=1e-6)


@EXAMPLES
@given(SEEDS)
def test_the_least_lead_is_that_of_the_worst_corner(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    low_BP = torch.randn(2, 4, generator=draw, dtype=torch.float64)
    high_BP = low_BP + torch.rand(2, 4, generator=draw, dtype=torch.float64)
    weight_KP = torch.randn(3, 4, generator=draw, dtype=torch.float64)
    class_B = torch.randint(3, (2,), generator=draw)
    found_B = least_lead(low_BP, high_BP, weight_KP, class_B)
    for row in range(2):
        leads = []
        for score_P in itertools.product(*zip(low_BP[row].tolist(), high_BP[row].tolist(), strict=True)):
            logits_K = [sum(w * s for w, s in zip(w_P, score_P, strict=True)) for w_P in weight_KP.tolist()]
            own = logits_K.pop(int(class_B[row]))
            leads.append(own - max(logits_K))
        assert float(found_B[row]) == pytest.approx(min(leads))


def test_when_the_theorem_does_not_apply() -> None:
    assert why_theorem_does_not_apply([tiny_model([2, 2])]) == ""
    assert "2 to 3 prototypes" in why_theorem_does_not_apply([tiny_model([2, 3])])
    assert "linear" in why_theorem_does_not_apply([tiny_model([2, 2], similarity="linear")])
    assert "cosine" in why_theorem_does_not_apply([tiny_model([2, 2], similarity="cosine")])
    assert "2 networks" in why_theorem_does_not_apply([tiny_model([2, 2])] * 2)


def test_a_certified_prediction_that_changed_is_refuted() -> None:
    stays, moves = Verdict(0, 0, 0.5), Verdict(0, 1, 0.5)
    strong, weak = Theorem(True, 0.5, 1.0, 2.0, True), Theorem(True, 0.5, 1.0, 1.9, True)
    unproven = Verdict(0, 1, -0.5)
    refuted = [
        ImageCertificate("by the run's bound", 0, moves, stays, None),
        ImageCertificate("by the (A4) bound", 0, stays, moves, weak),
        ImageCertificate("by the theorem", 0, stays, unproven, strong),
    ]
    sound = [
        ImageCertificate("not certified", 0, unproven, unproven, weak),
        ImageCertificate("not correct", 0, unproven, unproven, Theorem(True, 0.5, 1.0, 2.0, False)),
        ImageCertificate("not (A1)", 0, unproven, unproven, Theorem(False, 0.5, 1.0, 2.0, True)),
        ImageCertificate("not (A2)", 0, unproven, unproven, Theorem(True, None, None, 2.0, True)),
    ]
    assert Certificate((*refuted, *sound), "").refuted == tuple(refuted)
