"""Scores too large for memory: a file of float16, and the same last layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.last_layer import kkt_residual
from helpers.runs import make_tiny_birds
from helpers.tiny import random_images, tiny_model

import likethat
from likethat import runtime
from likethat.config.presets import resolve
from likethat.data.loaders import Images, views_of
from likethat.errors import UserError
from likethat.inference import memory_map
from likethat.inference.passes import score_images
from likethat.inference.score_cache import cache_scores, cached_scores
from likethat.inference.source_image import leave_source_out
from likethat.runs import layout
from likethat.training import last_layer_problem
from likethat.training.last_layer import objective, solve_last_layer
from likethat.training.pruning import prune
from likethat.training.pruning.prune import CachedScores, largest_lambda, refit_last_layer
from likethat.workflows import prune as prune_workflow
from likethat.workflows import run_setup


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("similarity", ["log", "cosine"])
def test_the_file_holds_the_scores(
    tied: bool, similarity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model([3, 1, 2], similarity=similarity)
    images: Images = views_of(random_images(35, 3), resolve().augment, seed=3, count=2)
    source_P = torch.tensor([0, 3, 6, 1, 2, 5]) if tied else None
    exact_NP = score_images(model, images)
    if source_P is not None:
        exact_NP = leave_source_out(exact_NP, torch.arange(35).repeat(2)[:, None], source_P, model.own_KP)
    file = tmp_path / "made" / "scores"
    with cached_scores(model, images, source_P, file) as score_NP:
        assert torch.equal(score_NP, exact_NP)  # small enough for memory
    assert not file.parent.exists()
    monkeypatch.setattr(memory_map, "MEMORY_SHARE", 0.0)
    monkeypatch.setattr(type(model.prototype_layer).in_blocks, "__defaults__", (1000,))  # few prototypes at a time
    with cached_scores(model, images, source_P, file) as score_NP:
        assert score_NP.dtype == torch.float16
        torch.testing.assert_close(score_NP.float(), exact_NP, rtol=1e-3, atol=1e-3)
    assert list(file.parent.iterdir()) == []


@pytest.mark.parametrize("tied", [False, True])
def test_pruning_from_a_file_is_pruning_from_memory(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores in a file, a few rows at a time: what is kept of them, what is left out of them, logits, solutions."""
    model, images = tiny_model([3, 1, 2]), random_images(70, 3)
    layer = model.prototype_layer
    source_P = torch.tensor([0, 3, 6, 1, 2, 5]) if tied else None
    data = (images.label_N, layer.class_P, 3, source_P, len(images))
    keep_p, settings = torch.tensor([0, 2, 3, 4, 5]), resolve().train
    with cached_scores(model, images, None, tmp_path / "none") as score_NP:
        whole = CachedScores(score_NP.half().float(), *data)
    monkeypatch.setattr(memory_map, "MEMORY_SHARE", 0.0)
    monkeypatch.setattr(prune, "BLOCK", 60)
    monkeypatch.setattr(last_layer_problem, "BLOCK", 60)
    filed = CachedScores(cache_scores(model, images, None, tmp_path / "scores"), *data, tmp_path)
    for one, other in ((whole, filed), (whole.select(keep_p), filed.select(keep_p))):
        assert other.score_NP.dtype == other.fair().score_NP.dtype == torch.float16
        torch.testing.assert_close(other.score_NP.float(), one.score_NP, rtol=0, atol=0)
        torch.testing.assert_close(other.fair().score_NP.float(), one.fair().score_NP, rtol=1e-3, atol=1e-3)
        weight_KP = torch.rand(3, len(one.class_P))
        torch.testing.assert_close(other.logits(weight_KP), one.score_NP @ weight_KP.T)
        assert largest_lambda(other, settings) == pytest.approx(largest_lambda(one, settings), rel=2e-3)
        solutions = [refit_last_layer(scores, None, settings) for scores in (one, other)]
        assert solutions[1].objective == pytest.approx(solutions[0].objective, rel=2e-3)
    torch.testing.assert_close(filed.logits(torch.ones(3, 5), keep_p), whole.score_NP[:, keep_p] @ torch.ones(5, 3))


def test_a_file_larger_than_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = tiny_model([2, 2]), random_images(4, 2)
    monkeypatch.setattr(memory_map, "MEMORY_SHARE", 0.0)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with (
        pytest.raises(UserError, match="scores of the images need"),
        cached_scores(model, images, None, tmp_path / "scores"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_blocks_of_any_size_have_the_same_optimum(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(rows)
    label_N, class_P = torch.arange(120) % 4, torch.arange(4).repeat_interleave(3)
    exact_NP = 1 + torch.rand(120, 12, generator=generator) + (label_N[:, None] == class_P)
    score_NP = torch.from_file(str(tmp_path / "scores"), shared=True, size=120 * 12, dtype=torch.float16).view(120, 12)
    score_NP.copy_(exact_NP)
    whole = solve_last_layer(score_NP.float(), label_N, class_P, 4, lam=1e-3, ridge=1e-3)
    monkeypatch.setattr(last_layer_problem, "BLOCK", rows * 12 * 4)
    found = solve_last_layer(score_NP, label_N, class_P, 4, lam=1e-3, ridge=1e-3)
    assert found.kkt_residual <= 1e-5
    assert kkt_residual(found.weight_KP, score_NP.float(), label_N, class_P, lam=1e-3, ridge=1e-3) <= 1.1e-5
    assert found.objective == pytest.approx(whole.objective, abs=1e-5)
    assert found.nonzero_negative == whole.nonzero_negative
    logits_NK = score_NP.float() @ found.weight_KP.T
    assert found.accuracy == float((logits_NK.argmax(1) == label_N).double().mean())
    # Against the scores before they were rounded.
    exact = solve_last_layer(exact_NP, label_N, class_P, 4, lam=1e-3, ridge=1e-3)
    at_found = objective(found.weight_KP, exact_NP, label_N, class_P, lam=1e-3, ridge=1e-3)
    assert at_found == pytest.approx(exact.objective, abs=1e-4)


@pytest.mark.parametrize(("limit", "counts"), [("1000000\n", True), ("max\n", False), (f"{2**63 - 4096}\n", False)])
def test_a_containers_limit_counts(limit: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "CONTAINER_LIMITS", ())
    machine = runtime.physical_memory()
    (tmp_path / "limit").write_text(limit)
    monkeypatch.setattr(runtime, "CONTAINER_LIMITS", (tmp_path / "limit", tmp_path / "none"))
    assert runtime.physical_memory() == (1_000_000 if counts else machine)


def test_a_run_is_trained_from_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And pruned, with neither pixels nor scores in memory; nothing of them is left."""
    monkeypatch.setattr(run_setup, "MEMORY_SHARE", 0.0)
    monkeypatch.setattr(memory_map, "MEMORY_SHARE", 0.0)
    monkeypatch.setattr(last_layer_problem, "BLOCK", 100)
    options = {"backbone": "test_resnet", "weights": "none", "latent_width": 16, "input_size": 64, "batch_size": 8}
    epochs = {"baseline_epochs": 1, "joint_epochs": (1,), "prototypes_per_class": 2}
    likethat.train(make_tiny_birds(tmp_path / "birds"), tmp_path / "run", device="cpu", **options, **epochs)
    (solved,) = [record for record in layout.read_metrics(tmp_path / "run") if record["stage"] == "last_layer"]
    assert solved["kkt_residual"] <= 1e-5
    assert 0 <= solved["train"]["accuracy"] <= 1
    monkeypatch.setattr(prune, "BLOCK", 50)
    pruned = prune_workflow.prune(tmp_path / "run", tmp_path / "pruned", keep_one=True, device="cpu")
    assert pruned["kkt_residual"] <= 1e-5
    prune_workflow.prune(tmp_path / "run", tmp_path / "sparse", budget=8, device="cpu")
    for made in ("scores*", "pixels*", "tmp*"):
        assert not list(tmp_path.rglob(made))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["birds", "pruned", "run", "sparse"]
