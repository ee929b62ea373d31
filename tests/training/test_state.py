"""What the saved state of a run holds, and of when."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.interrupted import signalled
from helpers.runs import DEFAULT, make_tiny_birds

from likethat.config.presets import resolve
from likethat.models.protopnet import create_protopnet
from likethat.progress import Display
from likethat.runs import layout
from likethat.runs.atomic_files import copy_state, load_tensors
from likethat.runtime import StopFlag
from likethat.training.course import Course
from likethat.training.state import RunState, copy_run_state
from likethat.workflows.run_setup import prepare


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_birds(tmp_path_factory.mktemp("birds") / "data")


def test_an_optimiser_is_kept_while_its_stage_comes_again(birds: Path, tmp_path: Path) -> None:
    """It is half of a state, which is written at the end of each stage."""
    run = tmp_path / "run"
    command = ["train", str(birds), "--out", str(run), *DEFAULT]
    kept = []
    for number, place in enumerate([("baseline", 4), ("joint", 1), ("last_layer", 1), ("report", 1)]):
        signalled([*command, "--resume"] if number else command, *place, save_every=0)
        tensors, document = load_tensors(run / layout.STATE)
        assert bool(document["optimizer_stage"]) == any(name.startswith("optimizer/") for name in tensors)
        kept.append(document["optimizer_stage"])
    assert kept == ["baseline", "", "joint", ""], "the joint stage has two cycles"


def test_a_state_is_written_as_it_was_when_it_was_copied(birds: Path, tmp_path: Path) -> None:
    config = resolve("quick", backbone="test_resnet", weights="none", input_size=(64, 64))
    prepared = prepare(birds, tmp_path, config, torch.device("cpu"), Display(quiet=True))
    images, classes = prepared.images, prepared.dataset.classes
    course = Course(images["train"], images["val"], classes, config, tmp_path, "", Display(quiet=True), StopFlag())
    model = create_protopnet(config.model, [2] * len(classes), weights="none")
    state = RunState(model, metrics=[{"stage": "parts"}])
    before = copy_state(model)
    write = copy_run_state(state, course)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state.metrics.append({"stage": "choose"})
    write()
    tensors, document = load_tensors(tmp_path / layout.STATE)
    assert tensors.keys() == {f"model/{name}" for name in before}
    assert all(torch.equal(tensors[f"model/{name}"], value) for name, value in before.items())
    assert document["metrics"] == layout.read_metrics(tmp_path) == [{"stage": "parts"}]
