"""`--warm-views`: the warm stage learns from exactly the maps that the frozen backbone gives for a few views."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.tiny import random_images, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from likethat.config import Config, TrainConfig, resolve
from likethat.data.augment import draw_views, show
from likethat.data.loaders import Images, training_batches
from likethat.errors import Interrupted, UserError
from likethat.inference import memory_map
from likethat.models.backbone import place
from likethat.models.baseline import PlainClassifier
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Display
from likethat.runtime import StopFlag, seed_for
from likethat.training.choose import start_from_classifier
from likethat.training.fit import Course, follow_plan
from likethat.training.losses import protopnet_costs
from likethat.training.phases import Step, make_plan, start_stage
from likethat.training.state import Progress
from likethat.training.steps import costs_of_step
from likethat.training.view_maps import cached_view_maps, rows_of_epoch

IMAGES, VIEWS = 12, 4
CONFIG = resolve("paper", warm_epochs=3, views=2, warm_views=VIEWS, batch_size=6, seed=7)
AUGMENTED = replace(CONFIG, augment=resolve("default").augment)  # each view recoloured, pierced and bent


def network() -> ProtoPNet:
    return place(tiny_model([2, 2, 2]), torch.device("cpu"))


def go_on() -> None:
    """Nobody asks for a stop."""


def slow_maps(model: ProtoPNet, images: Images, config: Config) -> Tensor:
    """The definition, V x N x C x H x W: view v of every image through the backbone in evaluation."""
    augment, maps = replace(config.augment, cutmix=0.0), []
    for view in range(config.train.warm_views):
        generator = torch.Generator().manual_seed(seed_for(config.train.seed, "warm view", view))
        x_N3HW, _ = images.batch(torch.arange(len(images)))
        with torch.no_grad():
            maps.append(model.eval().backbone(show(x_N3HW, draw_views(len(images), 1.0, augment, generator))))
    return torch.stack(maps)


@pytest.mark.parametrize("share", [0.25, 0.0])
def test_the_maps_are_those_of_the_definition(share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_map, "MEMORY_SHARE", share)
    model, images = network(), random_images(IMAGES, 3)
    exact_VNCHW = slow_maps(model, images, AUGMENTED)
    state = copy.deepcopy(model.state_dict())
    model.train()  # as the stage before may have left it
    told: list[tuple[int, int]] = []
    with cached_view_maps(
        model.backbone, images, AUGMENTED, tmp_path / "made" / "maps", go_on, lambda *at: told.append(at)
    ) as maps:
        row_B = torch.tensor([0, 1, 12, 17, 35, 36, 47])
        x_BCHW, label_BV, share_BV, image_BV = maps.show(*maps.gather(row_B, seed=0))
    assert torch.equal(x_BCHW, exact_VNCHW.flatten(0, 1)[row_B].half().float())
    assert image_BV.tolist() == [[0], [1], [0], [5], [11], [0], [11]]
    assert torch.equal(label_BV, images.label_N[image_BV])
    assert share_BV.tolist() == [[1.0]] * 7
    assert float((exact_VNCHW[0] - exact_VNCHW[1]).abs().mean()) > 0.01, "the views are alike"
    assert told == [(12, 48), (24, 48), (36, 48), (48, 48)]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not list(tmp_path.rglob("maps*"))
    assert (tmp_path / "made").exists() == (share == 0), "a file where memory is short, and none otherwise"


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.integers(2, 17), st.integers(1, 4), st.integers(1, 5), st.integers(1, 9))
def test_the_views_of_an_image_take_turns(images: int, batch_size: int, views: int, epochs: int, kept: int) -> None:
    train = TrainConfig(views=views, warm_epochs=epochs, warm_views=kept)
    seen: dict[int, list[int]] = {number: [] for number in range(images)}
    for epoch in range(epochs):
        batches = training_batches(images, batch_size, views, seed=epoch)
        rows = rows_of_epoch(batches, images, epoch, train)
        assert torch.equal(rows % images, batches)
        for row in rows.flatten()[: images * views].tolist():
            seen[row % images].append(row // images)
        filled_up = rows.flatten()[images * views :]
        assert torch.equal(filled_up, rows.flatten()[: len(filled_up)])
    for order in seen.values():
        assert order == [time % kept for time in range(epochs * views)]


@pytest.mark.parametrize("share", [0.25, 0.0])
def test_the_stage_is_that_of_the_definition(share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a loop that looks every map up by how often its image was shown before."""
    monkeypatch.setattr(memory_map, "MEMORY_SHARE", share)
    model, images = network(), random_images(IMAGES, 3)
    slow = copy.deepcopy(model)
    maps_VNHWC = slow_maps(slow, images, CONFIG).permute(0, 1, 3, 4, 2).half()
    optimizer = start_stage(slow, None, "warm", CONFIG.train)
    shown = [0] * IMAGES
    for epoch in range(3):
        for batch in training_batches(IMAGES, 6, 2, seed_for(7, "warm", epoch)).tolist():
            map_BHWC = torch.stack([maps_VNHWC[shown[number] % VIEWS, number] for number in batch])
            output = slow.head(slow.add_on(map_BHWC.permute(0, 3, 1, 2).float()))
            label_B1 = images.label_N[batch][:, None]
            optimizer.zero_grad()
            protopnet_costs(output, label_B1, torch.ones(len(batch), 1), slow.own_KP, CONFIG.train)["loss"].backward()
            optimizer.step()
            for number in batch:
                shown[number] += 1
    plan = [step for step in make_plan(CONFIG.train) if step.stage == "warm"]
    before = copy.deepcopy(model.state_dict())
    names = ("0", "1", "2")
    course = Course(images, images, names, CONFIG, tmp_path, Display(quiet=True), StopFlag())
    follow_plan(plan, Progress(model), course)
    for name, value in model.state_dict().items():
        assert torch.equal(value, slow.state_dict()[name]), name
        moves = name.startswith("add_on") or name == "prototype_layer.prototype_PDhw"
        assert torch.equal(value, before[name]) != moves, f"{name}, BatchNorm's statistics included"
    assert not list(tmp_path.rglob("maps*"))


def test_costs_of_maps_are_those_of_their_pictures() -> None:
    """Teacher and tied prototypes included: in the warm stage the teacher's backbone is the model's."""
    options = {"latent_width": 16, "warm_epochs": 2, "backbone": "test_resnet", "weights": "none", "input_size": 96}
    config, images = resolve("default", **options), random_images(IMAGES, 3)
    model = tiny_model([2, 2, 2], add_on="linear", similarity="cosine")
    progress = Progress(model, PlainClassifier(model.backbone, 3))
    assert progress.plain is not None
    progress.projection = start_from_classifier(model, progress.plain, images, config.train.telling)
    progress.make_teacher()
    model.eval()
    x_N3HW, label_N = images.batch(torch.arange(IMAGES))
    known_N1 = label_N[:, None], torch.ones(IMAGES, 1), torch.arange(IMAGES)[:, None]
    of_pictures = costs_of_step(progress, Step("warm"), config, x_N3HW, *known_N1)
    on_maps = replace(config, train=replace(config.train, warm_views=1))
    of_maps = costs_of_step(progress, Step("warm"), on_maps, model.backbone(x_N3HW), *known_N1)
    assert {"distillation", "loss"} <= of_maps.keys()
    assert of_maps == of_pictures


def test_what_cannot_be_kept_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = network(), random_images(IMAGES, 3)
    monkeypatch.setattr(memory_map, "MEMORY_SHARE", 0.0)
    with monkeypatch.context() as full:
        full.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
        with (
            pytest.raises(UserError, match="feature maps of --warm-views 4 need"),
            cached_view_maps(model.backbone, images, CONFIG, tmp_path / "maps", go_on),
        ):
            pass
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.mul_(1e6)
    with (
        pytest.raises(UserError, match=r"too large for float16.*--warm-views 0"),
        cached_view_maps(model.backbone, images, CONFIG, tmp_path / "maps", go_on),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_making_maps_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_map, "MEMORY_SHARE", 0.0)
    model, images, stop, done = network(), random_images(100, 3), StopFlag(), 0

    def check() -> None:
        nonlocal done
        done += 1
        stop.requested = done == 5  # in the second view: one check before each view, one after each batch of 64
        stop.check()

    with pytest.raises(Interrupted), cached_view_maps(model.backbone, images, CONFIG, tmp_path / "maps", check):
        pass
    assert done == 5
    assert list(tmp_path.iterdir()) == []
