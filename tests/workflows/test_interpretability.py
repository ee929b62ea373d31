"""`likethat evaluate --interpretability`: the command, what it keeps, and intervals that are what they say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from helpers.runs import DEFAULT, likethat, make_tiny_birds, make_tiny_run

from likethat.data.parts import read_parts
from likethat.metrics.figure import bootstrap_interval, wilson_interval
from likethat.metrics.sweep import ATTACKED, PERTURBED, Batch, Metric, Subject, sweep
from likethat.progress import Display
from likethat.runs.classifier import load
from likethat.runs.data import open_test_data
from likethat.workflows.interpretability import Interpretability, evaluate_interpretability


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("measured"))


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


def test_validation_images_are_measured_without_a_look_at_test_images(run: Path, tmp_path: Path) -> None:
    """Test pictures that cannot be read are no hindrance, and what was measured on test images stays as it is."""
    birds, copy = tmp_path / "birds", tmp_path / "run"
    shutil.copytree(run.parent / "birds", birds)
    shutil.copytree(run, copy)
    (copy / "interpretability.json").unlink(missing_ok=True)
    for picture in (birds / "test").rglob("*.jpg"):
        picture.write_bytes(b"no picture")
    document = json.loads(
        likethat("evaluate", copy, "--interpretability", "--part", "val", "--data", birds, "--json").stdout
    )
    assert document["part"] == document["evaluation"]["part"] == "val"
    assert not (copy / "interpretability.json").exists()
    assert json.loads((copy / "interpretability-val.json").read_text())["figures"] == document["figures"]
    notes = " ".join(figure["note"] for figure in document["figures"])
    assert "validation images" in notes
    assert "test images" not in notes
    classifier = load(run, "cpu")
    right = [classifier.predict(path).class_name == path.parent.name for path in (birds / "val").rglob("*.jpg")]
    assert document["evaluation"]["images"] == len(right) == 9
    assert document["evaluation"]["accuracy"] == pytest.approx(sum(right) / 9)
    report = (copy / "report.html").read_text()
    assert "How good the explanations are: validation images" in report
    assert "Examples: validation images" in report


def test_both_parts_stand_in_the_report_and_neither_overwrites_the_other(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    evaluate_interpretability(load(copy, "cpu"), None, Display(quiet=True))
    kept = (copy / "interpretability.json").read_bytes()
    shown = likethat("evaluate", copy, "--interpretability", "--part", "val").stdout
    assert "9 validation images" in shown
    assert (copy / "interpretability.json").read_bytes() == kept
    report = (copy / "report.html").read_text()
    assert report.count("How good the explanations are") == 2
    assert "Measured on 9 test images" in report
    assert "Measured on 9 validation images" in report


def test_part_is_refused_where_it_means_nothing(run: Path, tmp_path: Path) -> None:
    assert "--interpretability" in likethat("evaluate", run, "--part", "val", check=2).stderr
    other = make_tiny_birds(tmp_path / "other", seed=5)
    done = likethat("evaluate", run, "--interpretability", "--part", "val", "--data", other, check=2)
    assert "leave out --part val" in done.stderr


@pytest.fixture(scope="module")
def measured(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Interpretability:
    """What is measured of the run, whose own folder stays as it is."""
    copy = shutil.copytree(run, tmp_path_factory.mktemp("copy") / "run")
    return evaluate_interpretability(load(copy, "cpu"), None, Display(quiet=True))


def test_the_same_run_gives_the_same_figures(run: Path, measured: Interpretability) -> None:
    again = evaluate_interpretability(load(run, "cpu"), None, Display(quiet=True))
    assert again.figures == measured.figures


def test_other_data_leaves_the_run_as_it_is(run: Path, tmp_path: Path) -> None:
    other = make_tiny_birds(tmp_path / "other", seed=5)
    before = {path: path.read_bytes() for path in run.glob("*.*") if path.is_file()}
    shown = likethat("evaluate", run, "--interpretability", "--data", other).stdout
    assert "consistency" in shown
    assert {path: path.read_bytes() for path in run.glob("*.*") if path.is_file()} == before


class Seen(Metric):
    """Notes every image it is shown."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.shown: list[tuple[int, bool, bool]] = []

    def collect(self, batch: Batch) -> None:
        self.shown += [(int(index), batch.perturbed, batch.attacked) for index in batch.index_B]


def test_the_sweep_shows_every_image_once_and_samples_those_that_are_costly(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PERTURBED, "cpu", 5)
    monkeypatch.setitem(ATTACKED, "cpu", 2)
    classifier = load(run, "cpu")
    dataset, _ = open_test_data(classifier, None)
    subject = Subject(classifier, dataset.root, dataset.test, read_parts(dataset))
    metric = Seen(subject)
    logits_NK = sweep(subject, [metric], Display(quiet=True))
    assert sorted(index for index, _, _ in metric.shown) == list(range(9))
    assert sum(perturbed for _, perturbed, _ in metric.shown) == 5
    assert sum(attacked for _, _, attacked in metric.shown) == 2
    assert subject.sample_note(subject.perturbed).startswith("5 of 9 test images")
    expected = [max(p := classifier.predict(dataset.root / s.path).probabilities, key=p.get) for s in dataset.test]
    assert [classifier.classes[guess] for guess in logits_NK.argmax(1).tolist()] == expected


class SeenInTraining(Seen):
    on_training_images = True


def test_the_sweep_shows_training_images_to_metrics_that_want_them(run: Path) -> None:
    classifier = load(run, "cpu")
    dataset, _ = open_test_data(classifier, None)
    subject = Subject(classifier, dataset.root, dataset.test, read_parts(dataset), train=dataset.train)
    tested, trained = Seen(subject), SeenInTraining(subject)
    sweep(subject, [tested, trained], Display(quiet=True))
    assert sorted(index for index, _, _ in tested.shown) == list(range(9))
    assert sorted(index for index, _, _ in trained.shown) == list(range(18))


@pytest.mark.parametrize("count", [1, 2, 7, 96, 5794])
def test_wilsons_interval_solves_its_equation(count: int) -> None:
    """Its ends are the truths p from which the share lies z standard deviations away: n (share - p)² = z² p (1 - p)."""
    z = NormalDist().inv_cdf(0.975)
    for right in (0, 1, count // 3, count - 1, count):
        share = right / count
        found = wilson_interval(share, count)
        expected = sorted(np.roots([count + z * z, -2 * right - z * z, right * share]))
        assert found == pytest.approx(expected, abs=1e-9)
        assert 0 <= found[0] <= share <= found[1] <= 1


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


def test_a_run_combined_with_itself_lands_on_parts_as_it_does_alone(
    run: Path, measured: Interpretability, tmp_path: Path
) -> None:
    """Members are numbered through, and each is measured at its own maps."""
    likethat("combine", run, run, "--out", tmp_path / "twice")
    twice = evaluate_interpretability(load(tmp_path / "twice", "cpu"), None, Display(quiet=True))
    values = [{figure.name: figure.value for figure in result.figures} for result in (measured, twice)]
    same = "consistency", "purity", "part coverage", "pointing game", "mixed prototypes", "connections that are zero"
    for name in same:
        assert values[0][name] == pytest.approx(values[1][name]), name
    assert twice.by_prototype["purity"] == measured.by_prototype["purity"] * 2
    assert "How good the explanations are" in (tmp_path / "twice" / "report.html").read_text()


def test_a_pruned_run_is_measured_with_the_prototypes_it_has_left(run: Path, tmp_path: Path) -> None:
    likethat("prune", run, "--out", tmp_path / "pruned", "--keep-one")
    classifier = load(tmp_path / "pruned", "cpu")
    counts = {prototype.class_name for prototype in classifier.prototypes}
    assert len(counts) == 3
    result = evaluate_interpretability(classifier, None, Display(quiet=True))
    assert all(len(column) == len(classifier.prototypes) for column in result.by_prototype.values())
    values = {figure.name: figure.value for figure in result.figures}
    assert values["purity"] is not None


def test_data_without_annotations_is_measured_without_them(run: Path, tmp_path: Path) -> None:
    """Any folder: figures that need parts say that there are none, the others are there."""
    bare = tmp_path / "bare"
    shutil.copytree(run.parent / "birds", bare, ignore=shutil.ignore_patterns("*.json"))
    figures = evaluate_interpretability(load(run, "cpu"), str(bare), Display(quiet=True)).figures
    for figure in figures:
        if figure.group == "parts":
            assert figure.value is None
            assert figure.note.startswith("the data")
    measured = {figure.name for figure in figures if figure.value is not None}
    assert {"box overlap, picture moved", "insertion", "mixed prototypes", "gradient energy inside the box"} <= measured


def test_a_baseline_is_refused_with_one_sentence(run: Path, tmp_path: Path) -> None:
    likethat("baseline", run.parent / "birds", "--out", tmp_path / "baseline", *DEFAULT)
    done = likethat("evaluate", tmp_path / "baseline", "--interpretability", check=2)
    assert "has no explanations" in done.stderr
    assert "Traceback" not in done.stderr
