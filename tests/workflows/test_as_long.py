"""The baseline that is trained as long as a ProtoPNet: the same stages, views and targets, another head."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from helpers.interrupted import signalled
from helpers.runs import DEFAULT, PAPER, QUICK, make_tiny_birds
from helpers.tiny import random_images, tiny_model
from safetensors.torch import load_file, save_file

from likethat.cli.parser import main
from likethat.config.presets import resolve
from likethat.data.decode import read_image
from likethat.models.baseline import BaselineClassifier
from likethat.report.comparison import class_activation
from likethat.runs import layout
from likethat.runs.baseline import load_baseline
from likethat.training.batches import Shown
from likethat.training.loop import batch_costs
from likethat.training.plan import start_stage
from likethat.training.state import RunState


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("as_long")
    birds = str(make_tiny_birds(folder / "birds"))
    assert main(["baseline", birds, "--out", str(folder / "baseline"), *DEFAULT]) == 0
    assert main(["baseline", birds, "--out", str(folder / "long"), "--as-long", *DEFAULT]) == 0
    return folder


def lines_of(run: Path) -> list[dict[str, object]]:
    lines = layout.read_metrics(run)
    for line in lines:
        line.pop("seconds", None)
    return lines


def test_it_is_the_baseline_that_goes_on(folder: Path) -> None:
    short, long = lines_of(folder / "baseline"), lines_of(folder / "long")
    assert [line["stage"] for line in long] == [*["baseline"] * 2, *["joint"] * 2, "keep", "joint", "keep", "test"]
    assert long[:2] == short[:2]
    joint = [line["train"] for line in long if line["stage"] == "joint"]
    assert all({"cross_entropy", "distillation", "loss", "accuracy"} == set(means) for means in joint)  # type: ignore[call-overload]
    document = layout.read_config(folder / "long")
    assert (document["kind"], document["as_long"], document["began_with"]) == ("baseline", True, "random weights")
    assert "as_long" not in layout.read_config(folder / "baseline")


def test_the_best_cycle_on_validation_images_is_kept(folder: Path) -> None:
    kept = [line["val"]["accuracy"] for line in lines_of(folder / "long") if line["stage"] == "keep"]  # type: ignore[index]
    baseline = load_baseline(folder / "long", "cpu")
    val = [path for path in sorted((folder / "birds" / "val").rglob("*")) if path.is_file()]
    right = [class_activation(baseline, read_image(path)).class_name == path.parent.name for path in val]
    assert sum(right) / len(right) == max(kept)


def test_a_killed_one_goes_on_and_ends_the_same(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    command = ["baseline", str(folder / "birds"), "--out", str(out), "--as-long", *DEFAULT]
    assert signalled(command, "joint", 5, save_every=0).returncode == -9  # in the second epoch
    assert not (out / layout.MODEL).exists()
    assert main([word for word in command if word != "--as-long"] + ["--resume"]) == 2
    assert main([*command, "--resume"]) == 0
    assert (out / layout.MODEL).read_bytes() == (folder / "long" / layout.MODEL).read_bytes()
    assert (out / layout.CONFIG).read_bytes() == (folder / "long" / layout.CONFIG).read_bytes()
    assert lines_of(out) == lines_of(folder / "long")


def test_a_finished_baseline_is_where_it_goes_on_from(folder: Path, tmp_path: Path) -> None:
    command = ["baseline", str(folder / "birds"), "--out", str(tmp_path / "on"), "--as-long", *DEFAULT]
    assert main([*command, "--from-baseline", str(folder / "baseline")]) == 0
    assert (tmp_path / "on" / layout.MODEL).read_bytes() == (folder / "long" / layout.MODEL).read_bytes()
    assert lines_of(tmp_path / "on") == lines_of(folder / "long")[2:]
    digest = hashlib.sha256((folder / "baseline" / layout.MODEL).read_bytes()).hexdigest()
    began_with = layout.read_config(tmp_path / "on")["began_with"]
    assert began_with == f"baseline baseline: model.safetensors, SHA-256 {digest}"


def test_the_published_stages(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "long")
    assert main(["baseline", str(folder / "birds"), "--out", out, "--as-long", *PAPER]) == 0
    assert [line["stage"] for line in lines_of(tmp_path / "long")] == ["warm", *["joint", "keep"] * 2, "test"]
    capsys.readouterr()
    assert main(["info", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["as_long"]
    assert main(["baseline", str(folder / "birds"), "--out", f"{out}2", "--as-long", *QUICK]) == 2
    assert "no epochs" in capsys.readouterr().err


def test_only_the_head_differs_in_what_moves() -> None:
    """In each stage the head learns where a ProtoPNet's add-on does, at its rate; the backbone as a ProtoPNet's."""
    settings = resolve("paper").train
    protopnet, classifier = tiny_model([2, 2]), BaselineClassifier(tiny_model([2, 2]).backbone, 2)
    for stage in ("warm", "joint"):
        theirs = start_stage(protopnet, None, stage, settings).param_groups
        ours = start_stage(classifier, None, stage, settings).param_groups
        backbone = [group for group in theirs if len(group["params"]) == len(list(protopnet.backbone.parameters()))]
        assert len(ours) == 1 + len(backbone) == (1 if stage == "warm" else 2)
        assert ours[-1]["params"] == list(classifier.head.parameters())
        assert ours[-1]["lr"] == settings.add_on_lr
        assert all(p.requires_grad == (stage == "joint") for p in classifier.backbone.parameters())
        assert [group["lr"] for group in ours[:-1]] == [group["lr"] for group in backbone]


def test_its_backbone_learns_at_the_rate_of_its_protopnet() -> None:
    config, protopnet = resolve("default").train, tiny_model([2, 2])
    classifier = BaselineClassifier(protopnet.backbone, 2)
    theirs, ours = (RunState(model).optimizer_for("joint", config).param_groups for model in (protopnet, classifier))
    assert ours[0]["params"] == theirs[0]["params"]
    assert ours[0]["lr"] == theirs[0]["lr"] != config.backbone_lr


def test_its_loss_is_that_of_labels_by_area_and_its_own_probabilities() -> None:
    config = resolve("default", distillation=0.3, label_smoothing=0.2)
    torch.manual_seed(0)
    model = BaselineClassifier(tiny_model([1, 1, 1]).backbone, 3).eval()
    state = RunState(model, model)
    state.make_teacher()
    with torch.no_grad():
        model.head.weight.normal_()
    x_B3HW, _ = random_images(4, 3).batch(torch.arange(4))
    label_BV, piece_B = torch.tensor([[0, 1], [1, 1], [2, 0], [0, 2]]), torch.tensor([0.4, 0.0, 0.25, 0.1])
    nothing = torch.zeros(4, 0)
    share_BV = torch.stack([1 - piece_B, piece_B], 1)
    batch = Shown(x_B3HW, label_BV, share_BV, nothing, torch.arange(4), nothing, nothing)
    costs = batch_costs(state, "joint", config, *batch)
    expected = 0.0
    assert state.baseline is not None
    for x_3HW, (label, other), piece in zip(x_B3HW, label_BV.tolist(), piece_B.tolist(), strict=True):
        with torch.no_grad():
            ours_K = model(x_3HW[None])[0].log_softmax(0)
            views_2K = state.baseline(torch.stack([x_3HW, x_3HW.flip(-1)])).softmax(1)
        wanted_K = torch.zeros(3)
        wanted_K[label] += 1 - piece
        wanted_K[other] += piece
        labels = -float(((0.8 * wanted_K + 0.2 / 3) * ours_K).sum())
        taught_K = views_2K.mean(0)
        taught = float((taught_K * (taught_K.log() - ours_K)).sum())
        expected += (0.7 * labels + 0.3 * taught) / 4
    assert float(costs["loss"].detach()) == pytest.approx(expected, rel=1e-4)


def test_config_of_a_begun_run_says_its_weights(folder: Path, tmp_path: Path) -> None:
    file = folder / "baseline" / layout.MODEL
    weights = {name.removeprefix("backbone.net."): value for name, value in load_file(file).items()}
    save_file({name: value for name, value in weights.items() if "head" not in name}, tmp_path / "mine.safetensors")
    options = [*DEFAULT, "--baseline-epochs", "1", "--weights", str(tmp_path / "mine.safetensors")]
    assert main(["baseline", str(folder / "birds"), "--out", str(tmp_path / "run"), *options]) == 0
    digest = hashlib.sha256((tmp_path / "mine.safetensors").read_bytes()).hexdigest()
    document = json.loads((tmp_path / "run" / layout.CONFIG).read_text())
    assert document["began_with"] == f"mine.safetensors, SHA-256 {digest}"
