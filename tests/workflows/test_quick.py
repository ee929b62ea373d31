"""`--preset quick`: no epochs, and yet a ProtoPNet that every other command takes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from helpers.interrupted import contents, signalled
from helpers.runs import QUICK, likethat, make_tiny_birds

from likethat.inference import feature_maps
from likethat.models.backbone import create_backbone
from likethat.runs.classifier import load
from likethat.runtime import seed_for


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_birds(tmp_path_factory.mktemp("birds") / "data")


@pytest.fixture(scope="module")
def run(birds: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quick") / "run"
    likethat("train", birds, "--out", folder, *QUICK)
    return folder


def test_the_backbone_stays_as_it_is_and_there_are_no_epochs(run: Path) -> None:
    stages = [json.loads(line)["stage"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert stages == ["parts", "choose", "project", "last_layer", "test_projection", "test"]
    torch.manual_seed(seed_for(0, "weights"))
    begun = create_backbone("test_resnet", "none", (64, 64)).state_dict()
    ended = load(run, "cpu").networks[0].backbone.state_dict()
    assert all(torch.equal(ended[name], value) for name, value in begun.items())


def test_its_add_on_consists_of_discriminants_unless_told_otherwise(birds: Path, run: Path, tmp_path: Path) -> None:
    weights = []
    for start in ("lda", "pca"):
        likethat("train", birds, "--out", tmp_path / start, *QUICK, "--add-on-start", start)
        weights.append(load(tmp_path / start, "cpu").networks[0].add_on[0].weight)
    assert torch.equal(weights[0], load(run, "cpu").networks[0].add_on[0].weight)
    assert not torch.allclose(weights[0].abs(), weights[1].abs(), rtol=0.1)


def keep_no_maps() -> None:
    feature_maps.MEMORY_SHARE = 0.0


def test_maps_that_do_not_fit_are_computed_again_with_the_same_result(birds: Path, run: Path, tmp_path: Path) -> None:
    likethat("train", birds, "--out", tmp_path / "run", *QUICK, before=keep_no_maps)
    assert contents(tmp_path / "run") == contents(run)


def test_killed_anywhere_it_ends_the_same(birds: Path, run: Path, tmp_path: Path) -> None:
    train = ["train", str(birds), "--out", str(tmp_path / "run"), *QUICK]
    for stage in ("choose", "project", "last_layer", "report"):
        again = ["--resume"] if stage != "choose" else []
        assert signalled([*train, *again], stage, 1).returncode == -signal.SIGKILL, stage
    likethat(*train, "--resume")
    assert contents(tmp_path / "run") == contents(run)


def test_every_command_takes_it(birds: Path, run: Path, tmp_path: Path) -> None:
    verified = json.loads(likethat("verify", run, "--json", "--device", "cpu").stdout)
    assert verified["passed"]
    assert verified["prototypes"] == 9
    assert json.loads(likethat("evaluate", run, "--json", "--device", "cpu").stdout)["images"] == 9
    picture = sorted((birds / "test").rglob("*.jpg"))[0]
    sheet = json.loads(likethat("explain", run, picture, "--json", "--device", "cpu").stdout)
    assert len(sheet["images"]) == 1
    likethat("prune", run, "--out", tmp_path / "pruned", "--budget", "12", "--device", "cpu")
    likethat("edit", run, "--ban", "4", "--why", "test", "--out", tmp_path / "edited", "--device", "cpu")
    assert len(load(tmp_path / "edited", "cpu").prototypes) == 8
    likethat("export", run, "--format", "torch", "--out", tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").is_file()
    for made in ("pruned", "edited"):
        assert json.loads(likethat("verify", tmp_path / made, "--json", "--device", "cpu").stdout)["passed"]


def test_the_page_serves_it(birds: Path, run: Path) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    from helpers.serving import form, serving

    with serving(load(run, "cpu")) as client:
        answer = client.post("/api/explain", files=form(sorted((birds / "test").rglob("*.jpg"))[0]))
    assert answer.status_code == 200
    assert len(answer.json()["images"]) == 1


def test_a_head_that_is_solved_and_one_that_is_trained_exclude_each_other(birds: Path, tmp_path: Path) -> None:
    done = likethat("train", birds, "--out", tmp_path / "run", *QUICK, "--baseline-epochs", "3", check=2)
    assert "--fit-head takes the place of --baseline-epochs" in done.stderr
