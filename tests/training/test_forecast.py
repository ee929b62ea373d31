"""How long a run takes is told from work that is counted as the networks do it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import DEFAULT, likethat, make_tiny_birds
from helpers.tiny import random_images

from likethat.config.presets import resolve
from likethat.config.settings import Config
from likethat.models.backbone import Backbone
from likethat.models.baseline import BaselineClassifier
from likethat.models.protopnet import create_protopnet
from likethat.progress import Display, in_words
from likethat.runtime import StopFlag
from likethat.training import forecast, loop
from likethat.training.course import Course
from likethat.training.forecast import Forecast, pictures_of
from likethat.training.plan import PlanEntry, epochs_to_come, make_plan, title_of

TRAIN, VAL, CLASSES = 24, 9, 3
TINY = {"backbone": "test_resnet", "weights": "none", "input_size": 64, "latent_width": 16, "batch_size": 8}


class Noted(Display):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def make_course(config: Config, run: Path, display: Display) -> Course:
    train, val = random_images(TRAIN, CLASSES, 64), random_images(VAL, CLASSES, 64)
    return Course(train, val, ("a", "b", "c"), config, run, "", display, StopFlag())


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("default", {"baseline_epochs": 2, "warm_epochs": 1, "joint_epochs": (2, 1)}),
        ("paper", {"warm_epochs": 1, "joint_epochs": (1, 2), "views": 2}),
        ("quick", {}),
    ],
)
def test_work_is_counted_as_the_network_does_it(
    preset: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every entry of the plan, pictures that went forward through any backbone, and twice those that went back."""
    config = resolve(preset, **TINY, prototypes_per_class=3, **options)
    model = create_protopnet(config.model, [3] * CLASSES)
    baseline = BaselineClassifier(model.backbone, CLASSES) if config.train.has_baseline else None
    seen: list[float] = []
    forward = Backbone.forward

    def counted(self: Backbone, x_B3HW: torch.Tensor) -> torch.Tensor:
        feature_BCHW = forward(self, x_B3HW)
        seen[-1] += len(x_B3HW) * (3 if feature_BCHW.requires_grad else 1)
        return feature_BCHW

    def begin(number: int, _: dict[str, Any]) -> None:
        seen.append(0.0)

    monkeypatch.setattr(Backbone, "forward", counted)
    seen.append(0.0)
    loop.fit(model, baseline, replace(make_course(config, tmp_path, Noted()), observe=begin))
    plan = make_plan(config.train)
    assert len(seen) == len(plan) + 1
    expected = [pictures_of(entry, config, TRAIN, VAL) for entry in plan]
    assert seen[:-1] == pytest.approx(expected, abs=VAL), [entry.stage for entry in plan]


def test_the_rest_is_the_work_left_at_the_pace_of_its_stage(tmp_path: Path) -> None:
    config = resolve("default", **TINY, prototypes_per_class=3, baseline_epochs=3, joint_epochs=(2,))
    plan, display = make_plan(config.train), Noted()
    work = [pictures_of(entry, config, TRAIN, VAL) for entry in plan]
    told = Forecast(plan, 0, make_course(config, tmp_path, display))
    assert told.left(0) is None
    told.after_entry(1, 2.0 * work[1])  # the first epoch, after the parts
    assert told.left(2) == pytest.approx(2.0 * sum(work[2:]))
    assert told.left(2, 0.25) == pytest.approx(2.0 * (sum(work[2:]) - 0.25 * work[2]))
    told.after_entry(4, 0.5 * work[4])  # choosing, faster than steps
    assert told.left(3) == pytest.approx(2.0 * work[3] + 0.5 * sum(work[4:]))
    assert display.note == f"about {in_words(0.5 * sum(work[5:]))} to the end of the run"
    told.after_entry(len(plan) - 1, 1.0)
    assert display.note == ""


def test_a_long_run_on_a_cpu_names_the_two_shortest_ways(tmp_path: Path) -> None:
    config = resolve("default", **{**TINY, "input_size": 224}, prototypes_per_class=3)
    plan, display = make_plan(config.train), Noted()
    work = [pictures_of(entry, config, TRAIN, VAL) for entry in plan]
    told = Forecast(plan, 0, make_course(config, tmp_path, display))
    told.after_entry(1, 0.2 * work[1])
    assert len(display.lines) == 2
    assert display.lines[0] == f"the whole run takes about {in_words(0.2 * sum(work[2:]))} on this machine"
    fewer = resolve("default", **{**TINY, "input_size": 224}, prototypes_per_class=3, joint_epochs=(5, 1))
    seconds = 0.2 * sum(pictures_of(entry, fewer, TRAIN, VAL) for entry in make_plan(fewer.train))
    ways = dict(told.shortcuts())
    assert set(ways) == {"--preset quick", "--baseline-epochs 10", "--joint-epochs 5,1", "--input-size 160x160"}
    assert ways["--joint-epochs 5,1"] == pytest.approx(seconds)
    assert ways["--input-size 160x160"] == pytest.approx(0.2 * sum(work) * (160 / 224) ** 2)
    (first, quickest), (second, next_one) = sorted(ways.items(), key=lambda way: way[1])[:2]
    said = f"with {first} about {in_words(quickest)}, with {second} about {in_words(next_one)}"
    assert display.lines[1] == f"note: a new run takes less {said}"
    told.after_entry(2, 0.2 * work[2])
    assert len(display.lines) == 2, "once"


def test_a_short_run_gets_no_advice(tmp_path: Path) -> None:
    config, display = resolve("default", **TINY), Noted()
    told = Forecast(make_plan(config.train), 3, make_course(config, tmp_path, display))
    told.after_entry(3, 1.0)
    assert len(display.lines) == 1
    assert display.lines[0].startswith("the rest of the run takes about ")


def test_a_pace_is_taken_from_steps_after_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is the test's: finding parts takes an hour, the first step ten seconds, those after it one."""
    now = 0.0
    monkeypatch.setattr(forecast.time, "monotonic", lambda: now)
    config, display = resolve("default", **TINY), Noted()
    plan = make_plan(config.train)
    told = Forecast(plan, 0, make_course(config, tmp_path, display))
    now += 3600.0
    told.after_entry(0, 3600.0)
    assert display.note == "", "nothing is known of epochs"
    for step in range(3):
        assert told.left(1) is None
        now += 10.0 if step < 1 else 1.0
        told.after_step(1, step + 1, 20)
    work = [pictures_of(entry, config, TRAIN, VAL) for entry in plan]
    pace = 20 / work[1]
    assert told.left(1) == pytest.approx(pace * sum(work[1:]))
    assert display.note == f"about {in_words(pace * sum(work[1:]) - 3)} to the end of the run"
    assert display.lines[0] == f"the whole run takes about {in_words(now + pace * sum(work[1:]) - 3)} on this machine"


def test_a_command_tells_epochs_and_the_whole_run(tmp_path: Path) -> None:
    birds = make_tiny_birds(tmp_path / "birds")
    said = likethat("train", birds, "--out", tmp_path / "run", *DEFAULT).stderr
    assert said.count("the whole run takes about ") == 1
    for number in (1, 2, 3):
        assert f"joint epoch {number} of 3: " in said
    assert "baseline epoch 2 of 2: " in said
    last = next(line for line in said.splitlines() if line.startswith("joint epoch 2 of 3: "))
    assert last.endswith(" to the end of the run")


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (12_000, "3 h 20 min")]
)
def test_times_are_told_as_people_say_them(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_epochs_that_follow_each_other() -> None:
    config = resolve("default", baseline_epochs=2, joint_epochs=(3, 1)).train
    plan = make_plan(config)
    assert [epochs_to_come(plan, n) for n in range(len(plan)) if plan[n].is_epoch] == [2, 1, 3, 2, 1, 1]
    assert title_of(PlanEntry("joint", 1, 3), config) == "joint epoch 4 of 4"
