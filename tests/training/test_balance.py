"""`--balance` and weights of a table: images that count more are as if there were more of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.last_layer import kkt_residual
from helpers.runs import DEFAULT, QUICK, likethat, make_tiny_birds
from hypothesis import given
from hypothesis import strategies as st

from likethat.config.settings import ModelConfig
from likethat.data.dataset import DataSet, Sample
from likethat.data.loaders import image_weights, training_batches
from likethat.errors import UserError
from likethat.progress import Display
from likethat.runs import layout
from likethat.runs.classifier import load
from likethat.training.head import solve_head
from likethat.training.last_layer import solve_last_layer
from likethat.training.losses import by_class
from likethat.workflows.edit.model import open_workshop
from likethat.workflows.run_setup import prototypes_by_class

SOLVED = {"lam": 1e-3, "ridge": 1e-3, "tol": 1e-7}


def samples_of(labels: list[int], weights: list[float] | None = None) -> list[Sample]:
    return [Sample(f"{n}.jpg", label, weight=1.0 if weights is None else weights[n]) for n, label in enumerate(labels)]


def test_classes_count_alike_and_images_as_the_table_says() -> None:
    labels = [0] * 8 + [1] * 2
    assert image_weights(samples_of(labels), balance=False) is None
    assert image_weights(samples_of([0, 1, 0, 1]), balance=True) is None, "already alike"
    weight_N = image_weights(samples_of(labels), balance=True)
    assert weight_N is not None
    assert torch.allclose(weight_N, torch.tensor([0.625] * 8 + [2.5] * 2).double())
    weight_N = image_weights(samples_of([0, 0, 1], [3.0, 1.0, 1.0]), balance=True)
    assert weight_N is not None
    assert torch.allclose(weight_N, torch.tensor([1.125, 0.375, 1.5]).double())


@given(
    weights=st.lists(st.floats(0.05, 20), min_size=1, max_size=30),
    batch_size=st.integers(1, 8),
    views=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_an_image_comes_as_often_as_its_weight_says(
    weights: list[float], batch_size: int, views: int, seed: int
) -> None:
    weight_N = torch.tensor(weights).double()
    weight_N = weight_N / weight_N.mean()
    drawn = training_batches(len(weights), batch_size, views, seed, weight_N)
    assert drawn.shape == training_batches(len(weights), batch_size, views, seed).shape, "as many steps as ever"
    for epoch_N in drawn.flatten()[: views * len(weights)].split(len(weights)):
        count_N = epoch_N.bincount(minlength=len(weights))
        assert bool((count_N >= (weight_N - 1e-9).floor()).all())
        assert bool((count_N <= (weight_N + 1e-9).ceil()).all())


def test_over_many_epochs_the_weights_are_kept() -> None:
    weight_N = torch.tensor([0.3, 0.3, 0.4, 3.0]).double()
    count_N = torch.cat([training_batches(4, 4, 1, seed, weight_N).flatten() for seed in range(2000)]).bincount()
    assert torch.allclose(count_N.double() / 2000, weight_N, atol=0.04)


@pytest.mark.parametrize("own_positive", [False, True])
def test_a_weight_of_three_is_three_images_to_the_last_layer(own_positive: bool) -> None:
    score_NP, label_N, class_P = torch.rand(24, 6).double(), torch.arange(24) % 3, torch.arange(6) // 2
    times_N = torch.tensor([3, 1] * 12)
    weight_N = times_N / times_N.double().mean()
    found = solve_last_layer(score_NP, label_N, class_P, 3, own_positive=own_positive, weight_N=weight_N, **SOLVED)
    many = solve_last_layer(
        score_NP.repeat_interleave(times_N, 0),
        label_N.repeat_interleave(times_N),
        class_P,
        3,
        own_positive=own_positive,
        **SOLVED,
    )
    assert found.objective == pytest.approx(many.objective, abs=1e-9)
    assert torch.allclose(found.weight_KP, many.weight_KP, atol=1e-3)
    plain = solve_last_layer(score_NP, label_N, class_P, 3, own_positive=own_positive, **SOLVED)
    assert not torch.allclose(found.weight_KP, plain.weight_KP, atol=1e-2)


def test_a_weight_of_three_is_three_images_to_the_head() -> None:
    feature_NC, label_N = torch.randn(24, 5).double(), torch.arange(24) % 3
    feature_NC -= feature_NC.mean(0)  # its mean and scale are taken over the images as they are
    times_N = torch.tensor([3] * 12 + [1] * 12)
    feature_NC[12:] = feature_NC[:12].roll(5, 0)
    found = solve_head(feature_NC, label_N, 3, 0.1, times_N / times_N.double().mean())
    many = solve_head(feature_NC.repeat_interleave(times_N, 0), label_N.repeat_interleave(times_N), 3, 0.1)
    assert torch.allclose(found[0], many[0], atol=1e-2)
    assert not torch.allclose(found[0], solve_head(feature_NC, label_N, 3, 0.1)[0], atol=1e-2)


def test_edits_keep_to_the_balance_of_the_run(tmp_path: Path) -> None:
    birds = make_tiny_birds(tmp_path / "birds")
    common, rare = sorted((birds / "train").iterdir())[:2]
    for picture in sorted(rare.iterdir())[2:]:
        picture.unlink()
    options = [*QUICK, "--add-on-start", "pca"]  # with discriminants the optimum is so flat that weights differ more
    likethat("train", birds, "--out", tmp_path / "run", *options, "--balance")
    assert layout.read_record(tmp_path / "run").config.train.balance
    workshop = open_workshop(tmp_path / "run", None, "cpu", Display(quiet=True))
    start = workshop.start()
    solved = workshop.solve(start.columns)
    workshop.scratch.cleanup()
    assert torch.allclose(solved.weight_KP, start.weight_KP, atol=2e-3), "nothing was edited"
    plain = tmp_path / "plain"
    likethat("train", birds, "--out", plain, *options)
    assert not torch.allclose(load(plain, "cpu").weight_KP, start.weight_KP, atol=1e-2)
    assert common.name != rare.name
    shutil.rmtree(plain)


def test_the_residual_knows_the_weights() -> None:
    score_NP, label_N, class_P = torch.rand(12, 4).double(), torch.arange(12) % 2, torch.tensor([0, 0, 1, 1])
    weight_N = torch.tensor([1.5, 0.5] * 6).double()
    found = solve_last_layer(score_NP, label_N, class_P, 2, weight_N=weight_N, **SOLVED)
    problem = (found.weight_KP, score_NP, label_N, class_P)
    assert kkt_residual(*problem, lam=1e-3, ridge=1e-3, weight_N=weight_N) <= 1e-7
    assert kkt_residual(*problem, lam=1e-3, ridge=1e-3) > 1e-4


@pytest.mark.parametrize(
    ("asked", "counts"),
    [("", [6, 6, 6]), ("auto", [6, 6, 3]), ("b=2, c=1", [6, 2, 1]), ("a=6", [6, 6, 6])],
)
def test_classes_get_the_prototypes_that_are_asked_for(asked: str, counts: list[int]) -> None:
    samples = tuple(samples_of([0] * 40 + [1] * 20 + [2] * 5))
    dataset = DataSet(Path("data"), "folder", ("a", "b", "c"), samples, (), ())
    assert prototypes_by_class(ModelConfig(prototypes_of=asked), dataset) == counts


@pytest.mark.parametrize("asked", ["d=2", "a=7", "a=0", "a=x", "a", "=3"])
def test_other_numbers_of_prototypes_are_refused(asked: str) -> None:
    dataset = DataSet(Path("data"), "folder", ("a", "b"), tuple(samples_of([0, 1])), (), ())
    with pytest.raises(UserError, match="--prototypes-of"):
        prototypes_by_class(ModelConfig(prototypes_of=asked), dataset)


def test_classes_with_fewer_prototypes_are_trained_as_ever(tmp_path: Path) -> None:
    birds = make_tiny_birds(tmp_path / "birds")
    name = sorted(path.name for path in (birds / "train").iterdir())[1]
    likethat("train", birds, "--out", tmp_path / "run", *DEFAULT, "--prototypes-of", f"{name}=1", "--balance")
    assert layout.read_record(tmp_path / "run").prototypes_of_class == (3, 1, 3)
    assert json.loads(likethat("verify", tmp_path / "run", "--json", "--device", "cpu").stdout)["passed"]


def test_maps_of_classes_with_fewer_prototypes_are_those_of_their_own() -> None:
    vector_PD = torch.rand(6, 4)
    padded_KmD = by_class(vector_PD, (3, 1, 2))
    assert torch.equal(padded_KmD[1], torch.stack([vector_PD[3], torch.zeros(4), torch.zeros(4)]))
    assert torch.equal(padded_KmD[2, :2], vector_PD[4:])
    assert torch.equal(by_class(vector_PD, (2, 2, 2)), vector_PD.view(3, 2, 4))
