"""Figures of unbalanced classes against scikit-learn, and intervals that hold what they promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from likethat.metrics.unbalanced import auprc, auroc, balanced_figures

sklearn = pytest.importorskip("sklearn.metrics")


@settings(max_examples=25)
@given(
    label=st.lists(st.integers(0, 2), min_size=4, max_size=40),
    seed=st.integers(0, 1000),
    coarse=st.booleans(),
)
def test_figures_are_those_of_scikit_learn(label: list[int], seed: int, coarse: bool) -> None:
    label_N = torch.tensor(label)
    logits_NK = torch.randn(len(label), 3, generator=torch.Generator().manual_seed(seed))
    logits_NK[torch.arange(len(label)), label_N] += 0.7
    if coarse:
        logits_NK = (2 * logits_NK).round()  # many ties
    found = balanced_figures(logits_NK, label_N, ("a", "b", "c"))
    share_NK, guess = logits_NK.double().log_softmax(1).numpy(), logits_NK.double().log_softmax(1).argmax(1).numpy()
    known = sorted(set(label))
    assert found.macro_f1.value == pytest.approx(
        sklearn.f1_score(label, guess, labels=known, average="macro", zero_division=0)
    )
    assert found.balanced_accuracy.value == pytest.approx(
        sklearn.recall_score(label, guess, labels=known, average="macro", zero_division=0)
    )
    for k, one in enumerate(found.classes):
        own = np.array(label) == k
        assert one.images == own.sum()
        if not own.any() or own.all():
            assert one.auroc is None
            continue
        assert one.auroc is not None
        assert one.auprc is not None
        assert one.sensitivity is not None
        assert one.specificity is not None
        assert one.auroc.value == pytest.approx(sklearn.roc_auc_score(own, share_NK[:, k]))
        assert one.auprc.value == pytest.approx(sklearn.average_precision_score(own, share_NK[:, k]))
        assert one.sensitivity.value == pytest.approx(sklearn.recall_score(own, guess == k))
        assert one.specificity.value == pytest.approx(sklearn.recall_score(~own, guess != k))
        for estimate in (one.auroc, one.auprc, one.sensitivity, one.specificity):
            assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1


def test_intervals_hold_the_truth_about_as_often_as_they_promise() -> None:
    """Scores of two normal distributions whose AUROC is known; AUPRC by a very large draw."""
    generator = np.random.default_rng(0)

    def draw(own: int, other: int) -> tuple[np.ndarray, np.ndarray]:
        score = np.concatenate([generator.normal(1.5, 1, own), generator.normal(0, 1, other)])
        return score, np.arange(own + other) < own

    truth = auroc(*draw(20_000, 80_000)).value, auprc(*draw(20_000, 80_000)).value
    inside = np.zeros(2)
    for _ in range(300):
        case = draw(30, 120)
        for number, estimate in enumerate((auroc(*case), auprc(*case))):
            inside[number] += estimate.low <= truth[number] <= estimate.high
    assert (inside / 300 > 0.9).all(), inside / 300


@pytest.mark.parametrize(
    ("sensitivities", "images"), [((0.95, 0.8), (40, 10)), ((0.9, 0.7, 0.6, 0.99), (6, 9, 30, 12))]
)
def test_the_interval_of_balanced_accuracy_holds_the_truth(
    sensitivities: tuple[float, ...], images: tuple[int, ...]
) -> None:
    generator, inside, classes = np.random.default_rng(0), 0, len(images)
    label_N = torch.arange(classes).repeat_interleave(torch.tensor(images))
    for _ in range(300):
        right = generator.random(len(label_N)) < np.repeat(sensitivities, images)
        guess_N = torch.where(torch.from_numpy(right), label_N, (label_N + 1) % classes)
        logits_NK = torch.nn.functional.one_hot(guess_N, classes).double()
        found = balanced_figures(logits_NK, label_N, "abcd"[:classes]).balanced_accuracy
        assert 0 <= found.low <= found.value <= found.high <= 1
        inside += found.low <= np.mean(sensitivities) <= found.high
    assert inside / 300 > 0.92


def test_a_class_that_always_wins_is_not_called_good() -> None:
    """95 good parts and 5 broken ones, all taken for good: accuracy says 95 %, these figures say what is wrong."""
    label_N = torch.tensor([0] * 95 + [1] * 5)
    logits_NK = torch.tensor([[3.0, 0.0]]).repeat(100, 1)
    found = balanced_figures(logits_NK, label_N, ("good", "broken"))
    assert found.balanced_accuracy.value == 0.5
    assert found.balanced_accuracy.high > 0.65, "five pictures do not tell much"
    assert found.macro_f1.value == pytest.approx(0.95 / 1.95)
    assert found.positive is not None
    assert found.positive.name == "broken"
    assert found.positive.sensitivity is not None
    assert found.positive.sensitivity.value == 0
    assert found.positive.sensitivity.high > 0.3, "five pictures do not tell much"
    assert found.positive.specificity is not None
    assert found.positive.specificity.value == 1
    assert found.macro_auroc == 0.5


def test_perfect_order_of_few_pictures_is_no_certainty() -> None:
    perfect = auroc(np.array([3.0, 2.0, 1.0, 0.0]), np.array([True, True, False, False]))
    assert perfect.value == 1
    assert perfect.low == pytest.approx(0.025**0.5)
    assert auroc(np.array([0.0, 1.0]), np.array([True, False])).value == 0
