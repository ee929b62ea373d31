"""`likethat bench`: the ratios are those of the times beside them, and a missed goal is told."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import bench_time_to_result
import pytest
import torch
from helpers.runs import TINY, make_tiny_birds

from likethat.bench import inference, run
from likethat.bench.last_layer import adam_passes, synthetic_scores
from likethat.bench.measure import BenchFigure, Goal, compare_times, in_turn, with_peak
from likethat.bench.setting import BACKBONES, Setting, setting_of
from likethat.cli.parser import main
from likethat.training.last_layer import objective, solve_last_layer

CPU = torch.device("cpu")
SMALL = Setting(
    CPU, ("test_resnet",), input_size=96, classes=3, per_class=2, batch=4, forward_batch=4, images=6, scored=60,
    steps=1, rounds=3,
)  # fmt: skip


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "setting_of", lambda device, quick, compile: SMALL)


def generous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks this small cost nothing, so that times say little; the goals are not what is tested then."""
    for module in ("training.STEP_TIME", "inference.PASS_TIME", "inference.EXPLAINING_TIME"):
        monkeypatch.setattr(f"likethat.bench.{module}", Goal(1e9))
    monkeypatch.setattr("likethat.bench.last_layer.FASTER", Goal(0.0, at_least=True))


@pytest.mark.usefixtures("_small")
def test_the_command_measures_everything_and_tells_a_missed_goal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generous(monkeypatch)
    assert main(["bench", "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["met"] is True
    assert document["prototypes"] == 6
    named = " ".join(f"{figure['what']} / {figure['against']}" for figure in document["figures"])
    for what in (
        "training step, paper",
        "training step, default",
        "inference",
        "projection",
        "explaining",
        "Adam passes",
    ):
        assert what in named
    assert all(figure["value"] > 0 for figure in document["figures"])

    monkeypatch.setattr(inference, "PASS_TIME", Goal(0.0))
    assert main(["bench", "--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("<= 0 MISSED") == 2  # projection and nearest patches
    assert "A GOAL WAS MISSED" in shown


def test_contenders_take_turns_and_ratios_are_medians_of_the_rounds() -> None:
    order: list[str] = []
    pauses: Iterator[float] = iter([0.0, 0.0, 0.02, 0.01, 0.04, 0.01, 0.03, 0.03])

    def contender(name: str) -> None:
        order.append(name)
        time.sleep(next(pauses))

    ours, other = in_turn([lambda: contender("a"), lambda: contender("b")], CPU, 3, seconds=0)
    assert "".join(order) == "abababab"
    for measured, slept in zip(ours + other, [0.02, 0.04, 0.03, 0.01, 0.01, 0.03], strict=True):
        assert measured >= slept
    (many,) = in_turn([lambda: None], CPU, 3, seconds=1e9)
    assert len(many) == 12
    figure = compare_times("net", "a", "b", [2.0, 4.0, 3.0], [1.0, 1.0, 3.0], Goal(1.9), runs=10)
    assert (figure.ours, figure.other, figure.value) == (300.0, 100.0, 2.0)
    assert not figure.met
    faster = compare_times("net", "a", "b", [2.0, 4.0, 3.0], [1.0, 1.0, 3.0], Goal(0.5, at_least=True))
    assert faster.value == 0.5
    assert faster.met


@pytest.mark.parametrize(
    ("value", "goal", "met"),
    [
        (1.1, Goal(1.1), True),
        (1.11, Goal(1.1), False),
        (0.93, Goal(0.93, at_least=True), True),
        (0.92, Goal(0.93, at_least=True), False),
        (9.0, None, True),
    ],
)
def test_a_goal_is_met_up_to_its_limit(value: float, goal: Goal | None, met: bool) -> None:
    figure = BenchFigure("net", "a", "b", value, 1.0, "ms", value, goal)
    assert figure.met is met
    assert figure.to_dict()["goal"] == (None if goal is None else str(goal))


def test_memory_is_what_was_needed_on_top() -> None:
    small, _ = with_peak(lambda: None, CPU)
    if small is None:
        pytest.skip("this system does not tell a process's peak")
    kept = torch.ones(16_000_000)  # 64 MB that were there before
    measured = [with_peak(lambda: torch.ones(32_000_000).sum(), CPU) for _ in range(5)]
    assert {float(result) for _, result in measured} == {32_000_000}
    # The middle one: the system may take pages of the process back at any moment.
    assert 120e6 < statistics.median(peak or 0 for peak, _ in measured) < 140e6
    assert len(kept) == 16_000_000


def test_a_full_run_has_the_size_that_the_goals_are_stated_for() -> None:
    for device in ("cpu", "cuda"):
        setting = setting_of(torch.device(device), quick=False, compile=False)
        assert setting.backbones == BACKBONES
        assert (setting.input_size, setting.classes, setting.prototypes) == (224, 200, 2000)
        assert setting.images >= setting.classes  # projection needs an image of each class


def test_the_solver_beats_the_recipe_it_is_measured_against() -> None:
    score_NP, label_N, class_P = synthetic_scores(SMALL)
    assert score_NP.shape == (60, 6)
    weight_KP = adam_passes(score_NP, label_N, class_P, 3)
    start_KP = torch.where(class_P == torch.arange(3)[:, None], 1.0, -0.5)
    data = (score_NP, label_N, class_P)
    terms = {"lam": 1e-4, "ridge": 1e-5}
    solved = solve_last_layer(*data, 3, **terms).objective
    assert solved <= objective(weight_KP, *data, **terms) <= objective(start_KP, *data, **terms)


def test_time_to_result_has_a_row_for_every_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    birds = make_tiny_birds(tmp_path / "birds")
    monkeypatch.setattr("sys.argv", ["bench", str(birds), *TINY, "--baseline-epochs", "1", "--joint-epochs", "1"])
    assert bench_time_to_result.main() == 1, "most of so short a run is no gradient descent"
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    seconds = {words[1].strip(): float(words[2]) for words in lines[1:]}
    *parts, whole, _ = seconds.values()
    assert whole == pytest.approx(sum(parts), abs=0.1 * len(parts))
    stages = ["parts", "baseline", "choose", "joint", "project", "last_layer"]
    assert list(seconds)[: 1 + len(stages)] == ["reading images", *stages]
    assert [bool(words[4].strip()) for words in lines[1:]] == [name in ("baseline", "joint") for name in seconds]
