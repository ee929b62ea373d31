"""`likethat evaluate --interpretability`: the command, what it keeps, and intervals that are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from runs import DEFAULT, likethat, make_tiny_birds

from likethat.classifier import load
from likethat.interpretability_run import evaluate_interpretability
from likethat.metrics.figure import bootstrap_interval, wilson_interval
from likethat.progress import Display


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    likethat("train", make_tiny_birds(folder / "birds"), "--out", folder / "run", *DEFAULT)
    return folder / "run"


def test_figures_are_printed_kept_and_shown_in_the_report(run: Path) -> None:
    accuracy = json.loads(likethat("evaluate", run, "--json").stdout)
    assert "How good the explanations are" not in (run / "report.html").read_text()
    document = json.loads(likethat("evaluate", run, "--interpretability", "--json").stdout)
    assert document["evaluation"].pop("cross_entropy") == pytest.approx(accuracy.pop("cross_entropy"))
    assert document["evaluation"] == accuracy
    assert json.loads((run / "interpretability.json").read_text())["figures"] == document["figures"]
    report = (run / "report.html").read_text()
    assert "How good the explanations are" in report
    for figure in document["figures"]:
        assert figure["name"] in report
        assert figure["value"] is None or figure["low"] is None or figure["low"] <= figure["value"] <= figure["high"]
        assert figure["value"] is not None or figure["note"]
    assert all(len(column) == 9 for column in document["by_prototype"].values())


def test_the_same_run_gives_the_same_figures(run: Path) -> None:
    first, second = (evaluate_interpretability(load(run, "cpu"), None, Display(quiet=True)) for _ in range(2))
    assert first.figures == second.figures


def test_other_data_leaves_the_run_as_it_is(run: Path, tmp_path: Path) -> None:
    other = make_tiny_birds(tmp_path / "other", seed=5)
    before = {path: path.read_bytes() for path in run.glob("*.*") if path.is_file()}
    shown = likethat("evaluate", run, "--interpretability", "--data", other).stdout
    assert "consistency" in shown
    assert {path: path.read_bytes() for path in run.glob("*.*") if path.is_file()} == before


def test_intervals_cover_the_truth_about_as_often_as_they_promise() -> None:
    generator = np.random.default_rng(1)
    truth, covered = 0.3, {"wilson": 0, "bootstrap": 0}
    for _ in range(300):
        draws = (generator.random(80) < truth).astype(float)
        for name, (low, high) in {
            "wilson": wilson_interval(float(draws.mean()), 80),
            "bootstrap": bootstrap_interval(draws),
        }.items():
            covered[name] += low <= truth <= high
    assert 0.9 < covered["wilson"] / 300 < 0.99
    assert 0.9 < covered["bootstrap"] / 300 < 0.99
