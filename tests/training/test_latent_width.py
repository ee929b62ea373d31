"""D by cross-validation: against the same thing done picture by picture, and as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.runs import DEFAULT, likethat, make_tiny_birds
from helpers.tiny import random_images, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

import likethat as package
from likethat.config.presets import resolve
from likethat.data.loaders import Images
from likethat.models.baseline import BaselineClassifier
from likethat.training import latent_width
from likethat.training.choose import start_from_baseline
from likethat.training.latent_width import (
    candidate_widths,
    choose_latent_width,
    held_out_fold,
    smallest_within_noise,
)
from likethat.training.parts import find_parts

OPTIONS = {"similarity": "cosine", "add_on": "linear"}


@pytest.mark.parametrize("add_on_start", ["pca", "lda"])
def test_stored_maps_and_folds_equal_a_slow_cross_validation(
    add_on_start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each width and fold with a model of its own on pictures: no map is stored, nothing is shared."""
    monkeypatch.setattr(latent_width, "WIDTHS", (4, 24))
    shell = tiny_model([1, 1, 1], latent_width=4, **OPTIONS)
    baseline = BaselineClassifier(shell.backbone, 3).eval()
    with torch.no_grad():
        baseline.head.weight.normal_()
    images = random_images(23, 3)
    options = {"backbone": "test_resnet", "weights": "none", "prototypes_per_class": 2, "add_on_start": add_on_start}
    config = resolve("default", **options)
    parts = find_parts(baseline.backbone, images, 2)
    choice = choose_latent_width(baseline, images, parts, config)
    expected = []
    for width in (4, 24):
        right = [False] * 23
        for fold in range(3):
            # The how-manieth of its class an image is: labels go 0, 1, 2, 0, 1, 2, ...
            out = [n for n in range(23) if n // 3 % 3 == fold]
            rest = [n for n in range(23) if n not in out]
            model = tiny_model([2, 2, 2], latent_width=width, **OPTIONS)
            model.backbone.load_state_dict(baseline.backbone.state_dict())
            own = BaselineClassifier(model.backbone, 3)
            own.head.load_state_dict(baseline.head.state_dict())
            inside = Images(images.pixel_NHW3[rest], images.label_N[rest], images.device)
            start_from_baseline(model, own, inside, parts.select(torch.tensor(rest)), add_on_start)
            for n in out:
                with torch.no_grad():
                    logits_1K = model.eval()(images.batch(torch.tensor([n]))[0]).logits_BK
                right[n] = int(logits_1K.argmax()) == int(images.label_N[n])
        expected.append(right)
    assert choice.right_WN.tolist() == expected
    assert expected[0] != expected[1], "two widths that agree in everything put nothing to the test"
    assert choice.accuracy() == {4: pytest.approx(np.mean(expected[0])), 24: pytest.approx(np.mean(expected[1]))}
    assert choice.chosen in (4, 24)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(2, 4))
def test_folds_spread_every_class_and_leave_it_an_image(labels: list[int], folds: int) -> None:
    held = held_out_fold(torch.tensor(labels), folds).tolist()
    for label in set(labels):
        members = [held[n] for n in range(len(labels)) if labels[n] == label]
        if len(members) == 1:
            assert members == [-1]
            continue
        counts = [members.count(fold) for fold in range(folds)]
        assert sum(counts) == len(members)
        assert max(counts) - min(counts) <= 1
        assert max(counts) < len(members)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=3))
def test_the_smallest_width_that_is_not_clearly_worse(rows: list[list[bool]]) -> None:
    right = np.array(rows, dtype=float)
    best = int(right.mean(1).argmax())
    for number in range(len(right)):
        difference = right[best] - right[number]
        if number == best or difference.mean() <= 2 * difference.std(ddof=1) / np.sqrt(12) + 1e-12:
            break
    assert smallest_within_noise(torch.tensor(rows)) == number


def test_a_clear_lead_counts_and_one_image_does_not() -> None:
    narrow = torch.ones(200, dtype=torch.bool)
    narrow[:40] = False
    assert smallest_within_noise(torch.stack([narrow, torch.ones_like(narrow)])) == 1
    narrow[:39] = True
    assert smallest_within_noise(torch.stack([narrow, torch.ones_like(narrow)])) == 0


@pytest.mark.parametrize(
    ("channels", "widths"), [(1280, (128, 256, 512)), (512, (128, 256, 512)), (300, (128, 256)), (96, (96,))]
)
def test_no_width_exceeds_the_backbones_channels(channels: int, widths: tuple[int, ...]) -> None:
    assert candidate_widths(channels) == widths


def test_a_run_chooses_says_so_and_is_a_run_like_any_other(tmp_path: Path) -> None:
    birds = make_tiny_birds(tmp_path / "birds")
    command = ["train", birds, "--out", tmp_path / "run", *DEFAULT, "--backbone", "test_efficientnet"]
    done = likethat(*command, "--latent-width", "auto")
    assert done.stderr.count("latent width: ") == 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    told = next(line for line in lines if line["stage"] == "latent_width")
    assert told["images"] == 18
    assert told["accuracy"].keys() == {"128", "256"}
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["config"]["model"]["latent_width"] == told["chosen"]
    network = package.load(tmp_path / "run", "cpu").networks[0]
    assert network.prototype_layer.prototype_PDhw.shape == (9, told["chosen"], 1, 1)
    assert json.loads(likethat("verify", tmp_path / "run", "--json").stdout)["passed"]
    # The same words find the run finished; other ones contradict it.
    assert "finished already" in likethat(*command, "--latent-width", "auto", "--resume").stderr
    other = likethat(*command, "--latent-width", "64", "--resume", check=2)
    assert "--latent-width" in other.stderr


def test_without_a_baseline_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(package.errors.UserError, match="name a number"):
        resolve("paper", latent_width="auto")
    with pytest.raises(package.errors.UserError, match="at least 1, or auto"):
        resolve("default", latent_width=0)
