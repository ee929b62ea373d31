"""Calibration error, coverage of prediction sets, and separating the unknown from the known: against scikit-learn and
loops, and on cases whose value is known."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.runs import likethat, make_tiny_run
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.metrics import roc_auc_score, roc_curve

from likethat.cli.parser import main
from likethat.data.synthetic.field_guide import make_birds
from likethat.metrics.conformal import LEVELS, conformal_figures
from likethat.metrics.figure import MetricFigure
from likethat.metrics.out_of_distribution import NONE_GIVEN, auroc, fpr95, out_of_distribution_figures
from likethat.metrics.reliability import BINS, calibration_figures, reliability
from likethat.models.protopnet import summed_logits
from likethat.report.measured import draw_reliability
from likethat.runs.calibration import Calibration, fit_calibration
from likethat.runs.classifier import load
from likethat.runs.data import open_out_of_distribution

LIKENESS = st.lists(st.integers(0, 12).map(float), min_size=1, max_size=60)


def noisy_logits(count: int, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits drawn so that their softmax is the true distribution of the label: a perfectly calibrated model."""
    generator = torch.Generator().manual_seed(seed)
    logits_NK = 1.5 * torch.randn(count, classes, generator=generator)
    return logits_NK, torch.multinomial(logits_NK.softmax(1), 1, generator=generator)[:, 0]


# --- calibration error ---


@settings(deadline=None)
@given(st.integers(1, 80), st.integers(0, 1000))
def test_calibration_error_is_what_a_loop_finds(count: int, seed: int) -> None:
    logits_NK, label_N = noisy_logits(count, seed=seed)
    (figure,) = calibration_figures(logits_NK, label_N)
    error, filled = 0.0, 0
    for number in range(BINS):
        inside = []
        for logits_K, label in zip(logits_NK.double(), label_N.tolist(), strict=True):
            share, guess = logits_K.softmax(0).max(0)
            if number / BINS < share <= (number + 1) / BINS:
                inside.append((float(share), int(guess) == label))
        if inside:
            filled += 1
            sure, right = (sum(column) / len(inside) for column in zip(*inside, strict=True))
            error += len(inside) / count * abs(sure - float(right))
    assert figure.value == pytest.approx(error, abs=1e-9)
    assert figure.low is not None
    assert figure.high is not None
    assert figure.low <= figure.value <= figure.high
    bins = reliability(logits_NK, label_N)
    assert len(bins) == filled
    assert sum(found.images for found in bins) == count
    assert sum(found.images * abs(found.accuracy - found.confidence) for found in bins) / count == pytest.approx(error)


def test_a_calibrated_model_has_hardly_an_error_and_a_boaster_a_large_one() -> None:
    logits_NK, label_N = noisy_logits(20_000)
    (honest,), (boasting,) = (calibration_figures(logits, label_N) for logits in (logits_NK, 10 * logits_NK))
    assert honest.value is not None
    assert boasting.value is not None
    assert honest.value < 0.015
    assert boasting.value > 0.2
    few, label_n = noisy_logits(40)
    (on_few,) = calibration_figures(few, label_n)
    promised = float(on_few.note.rsplit(" ", 1)[1].removesuffix("%")) / 100
    drawn = [calibration_figures(*noisy_logits(40, seed=seed))[0].value or 0 for seed in range(30)]
    assert promised == pytest.approx(float(np.mean(drawn)), abs=0.03), "what a perfect model has on 40 images"


def test_the_picture_has_a_bar_for_each_bin() -> None:
    bins = reliability(*noisy_logits(300))
    root = ElementTree.fromstring(draw_reliability(bins))
    bars = root.findall("{http://www.w3.org/2000/svg}rect")
    assert len(bars) == len(bins)
    for bar, found in zip(bars, bins, strict=True):
        assert float(bar.attrib["height"]) == pytest.approx(260 * found.accuracy, abs=0.2)


# --- prediction sets ---


def test_sets_of_all_images_at_once_are_those_of_each() -> None:
    calibration = fit_calibration(*noisy_logits(30, seed=1))
    logits_NK, _ = noisy_logits(200, seed=2)
    for level in LEVELS:
        found_NK = calibration.prediction_sets(logits_NK.double().softmax(1), level)
        for logits_K, found_K in zip(logits_NK, found_NK, strict=True):
            (alone,) = calibration.likeliest_classes(logits_K[None].double().softmax(1), level)
            assert sorted(alone) == found_K.nonzero()[:, 0].tolist()


def test_coverage_is_near_the_promise() -> None:
    calibration = fit_calibration(*noisy_logits(999, seed=1))
    logits_NK, label_N = noisy_logits(4000, seed=2)
    figures = {figure.name: figure for figure in conformal_figures(calibration, logits_NK, label_N)}
    for level in LEVELS:
        coverage = figures[f"true class in the set, promised {level:.0%}"].value
        assert coverage == pytest.approx(level, abs=0.03)
    probability_NK = logits_NK.double().softmax(1)
    least = 1 - sorted(calibration.nonconformity)[950 - 1]
    size = figures["classes in a prediction set at 95%"].value
    assert size == pytest.approx(float((probability_NK >= least - 1e-12).sum(1).double().mean()))
    assert figures["abstains on known classes at 95%"].value == pytest.approx(0.05, abs=0.02)


def test_what_cannot_be_promised_is_not_measured() -> None:
    logits_NK, label_N = noisy_logits(20)
    assert all(
        figure.value is None and "calibrate" in figure.note for figure in conformal_figures(None, *noisy_logits(9))
    )
    few = {f.name: f for f in conformal_figures(fit_calibration(*noisy_logits(10, seed=3)), logits_NK, label_N)}
    assert few["true class in the set, promised 90%"].value is not None
    late = few["true class in the set, promised 95%"]
    assert late.value is None
    assert "too few" in late.note


# --- pictures of other things ---


@settings(deadline=None)
@given(LIKENESS, LIKENESS)
def test_auroc_and_fpr95_are_scikit_learns(known: list[float], other: list[float]) -> None:
    known_n, other_m = np.array(known), np.array(other)
    truth, values = np.r_[np.ones(len(known)), np.zeros(len(other))], np.r_[known_n, other_m]
    assert auroc(known_n, other_m) == pytest.approx(roc_auc_score(truth, values))
    pairs = [(a > b) + (a == b) / 2 for a in known for b in other]
    assert auroc(known_n, other_m) == pytest.approx(sum(pairs) / len(pairs), abs=1e-15)
    false_positive, true_positive, _ = roc_curve(truth, values, drop_intermediate=False)
    assert fpr95(known_n, other_m) == pytest.approx(false_positive[np.argmax(true_positive >= 0.95 - 1e-12)])


def test_values_known_by_construction() -> None:
    high, low = np.linspace(5, 6, 40), np.linspace(1, 2, 30)
    assert (auroc(high, low), fpr95(high, low)) == (1, 0)
    assert (auroc(low, high), fpr95(low, high)) == (0, 1)
    assert auroc(np.ones(7), np.ones(3)) == 0.5
    draw = np.random.default_rng(0).random((2, 4000))
    assert auroc(*draw) == pytest.approx(0.5, abs=0.03)
    assert fpr95(*draw) == pytest.approx(0.95, abs=0.02)


def test_figures_against_out_of_distribution_pictures() -> None:
    known_NK, other_MK = torch.randn(50, 3) + 3, torch.randn(70, 3)
    calibration = Calibration(tuple([0.1] * 19), tuple(float(v) for v in range(19)))
    found = out_of_distribution_figures(calibration, known_NK, other_MK, "cats")
    area, rate, abstains = found
    assert area.value == pytest.approx(auroc(known_NK.amax(1).numpy(), other_MK.amax(1).numpy()))
    for figure in found:
        assert isinstance(figure, MetricFigure)
        assert figure.low is not None
        assert figure.high is not None
        assert figure.low <= figure.value <= figure.high
        assert figure.note.endswith(": cats")
    silent = [max(row) < 0 or max(torch.tensor(row).double().softmax(0)) < 0.9 for row in other_MK.tolist()]
    assert abstains.value == pytest.approx(sum(silent) / len(silent))
    assert rate.better == "lower"
    assert [figure.note for figure in out_of_distribution_figures(calibration, known_NK, None, "")] == [NONE_GIVEN] * 3


# --- the command ---


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("trust"))


def test_out_of_distribution_pictures_are_found_at_any_depth_and_drawn_once(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = load(run, "cpu")
    for number in range(6):
        path = tmp_path / "cats" / ("deep" * (number % 2)) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (40 * number, 0, 0)).save(path)
    (tmp_path / "cats" / "notes.txt").write_text("no picture")
    found = open_out_of_distribution(classifier, str(tmp_path / "cats"))
    assert {sample.path for sample in found.test} == {f"{'deep/' * (n % 2)}{n}.png" for n in range(6)}
    monkeypatch.setattr("likethat.runs.data.MOST_OUT_OF_DISTRIBUTION", 4)
    assert open_out_of_distribution(classifier, str(tmp_path / "cats")).test == found.test[:4]


def test_of_cub_only_unknown_species_count(run: Path, tmp_path: Path) -> None:
    """A CUB of two species, one of which the run knows."""
    classifier, root = load(run, "cpu"), tmp_path / "CUB_200_2011"
    names = [classifier.classes[0], "300.Dodo"]
    tables = {
        "classes.txt": [f"{n + 1} {name}" for n, name in enumerate(names)],
        "images.txt": [f"{n + 1} {names[n % 2]}/{n}.jpg" for n in range(8)],
        "image_class_labels.txt": [f"{n + 1} {n % 2 + 1}" for n in range(8)],
        "train_test_split.txt": [f"{n + 1} {int(n < 4)}" for n in range(8)],
        "bounding_boxes.txt": [f"{n + 1} 1 2 10 20" for n in range(8)],
    }
    root.mkdir()
    for name, lines in tables.items():
        (root / name).write_text("\n".join(lines))
    found = open_out_of_distribution(classifier, str(tmp_path))
    assert sorted(sample.path for sample in found.test) == ["images/300.Dodo/5.jpg", "images/300.Dodo/7.jpg"]
    assert {sample.box for sample in found.test} == {(1.0, 2.0, 11.0, 22.0)}


def test_the_command_measures_shows_and_keeps_it(run: Path, tmp_path: Path) -> None:
    make_birds(tmp_path / "others", species=6, train=1, val=1, test=1, size=64, seed=9)
    done = likethat("evaluate", run, "--interpretability", "--ood", tmp_path / "others", "--json")
    document = json.loads(done.stdout)
    figures = {figure["name"]: figure for figure in document["figures"] if figure["group"] == "trust"}
    model = load(run, "cpu")
    pictures = {
        name: sorted(folder.rglob("*.jpg"))
        for name, folder in (("known", run.parent / "birds" / "test"), ("other", tmp_path / "others"))
    }
    likeness = {
        name: np.array([float(summed_logits(model.outputs([model.prepare(picture)])).max()) for picture in found])
        for name, found in pictures.items()
    }
    area = figures["AUROC of likeness, known against other pictures"]
    assert area["value"] == pytest.approx(auroc(likeness["known"], likeness["other"]), abs=0.02)
    assert f"9 images against 18: {tmp_path / 'others'}" == area["note"]
    right = [model.predict(picture).class_name == picture.parent.name for picture in pictures["known"]]
    bins = document["reliability"]
    assert sum(found["images"] * found["accuracy"] for found in bins) == pytest.approx(sum(right))
    assert math.isfinite(figures["expected calibration error"]["value"])
    report = (run / "report.html").read_text()
    chart = report.partition("Reliability: share of right predictions")[2].partition("</svg>")[0]
    assert chart.count("<title>") == len(bins)


def test_mistakes_are_told_before_anything_is_measured(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, told in (
        (("--interpretability", "--ood", tmp_path / "gone"), "There is no folder"),
        (("--interpretability", "--ood", tmp_path / "empty"), "has no pictures"),
        (("--ood", tmp_path), "--interpretability"),
    ):
        assert main(["evaluate", str(run), *map(str, arguments)]) == 2
        shown = capsys.readouterr()
        assert told in shown.err
        assert shown.out == ""
