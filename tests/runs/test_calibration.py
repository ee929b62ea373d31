"""Promises about new pictures: prediction sets that keep their level, and pictures unlike everything known."""

from __future__ import annotations

import json
import math
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs import DEFAULT, PAPER, make_tiny_birds, make_tiny_run
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from likethat.cli.parser import main
from likethat.errors import UserError
from likethat.explaining.explanation import explain
from likethat.models.protopnet import summed_logits
from likethat.runs.calibration import Calibration, Verdict, conformal_threshold, fit_calibration, read_calibration
from likethat.runs.classifier import load
from likethat.runs.describe import describe_run
from likethat.workflows.edit.editor import open_editor

LEVEL_STEPS = 1000  # levels are drawn as n / 1000, so that the literal versions can count exactly


def verdict_of(**changes: Any) -> Verdict:
    facts = {"level": 0.95, "classes": ("owl",), "informed": True, "likeness": 1.0, "unlike": False}
    return Verdict(
        **{**facts, "nearest": 7, "nearest_title": "red crown", "nearest_class": "wren", "similarity": 0.5, **changes}
    )


# --- the mathematics ---


@pytest.mark.parametrize(
    ("count", "level", "rank"),
    [(19, 0.95, 19), (18, 0.95, None), (4, 0.5, 3), (3, 0.5, 2), (99, 0.99, 99), (0, 0.1, None)],
)
def test_the_threshold_counts_the_new_picture_too(count: int, level: float, rank: int | None) -> None:
    values = [float(number) for number in range(1, count + 1)]
    assert conformal_threshold(values[::-1], level) == (math.inf if rank is None else rank)


@given(st.lists(st.integers(0, 20), max_size=40), st.integers(1, LEVEL_STEPS - 1))
def test_threshold_and_likeness_count_like_loops(values: list[int], steps: int) -> None:
    level = Fraction(steps, LEVEL_STEPS)
    literal = [v for v in sorted(values) if sum(w <= v for w in values) >= (len(values) + 1) * level]
    assert conformal_threshold([float(v) for v in values], steps / LEVEL_STEPS) == (literal[0] if literal else math.inf)
    calibration = Calibration((), tuple(float(v) for v in sorted(values)))
    for likeness in range(-1, 22):
        as_little = Fraction(1 + sum(v <= likeness for v in values), len(values) + 1)
        assert calibration.is_unlike(likeness, steps / LEVEL_STEPS) == (as_little <= 1 - level)


def set_of(calibration: Calibration, probabilities: list[float], level: float) -> list[int]:
    """The prediction set of one picture."""
    (found,) = calibration.likeliest_classes(torch.tensor([probabilities], dtype=torch.float64), level)
    return found


def test_the_set_is_in_order_and_may_be_empty() -> None:
    calibration = Calibration((0.1, 0.2, 0.7), (1.0, 2.0, 3.0))
    assert set_of(calibration, [0.35, 0.55, 0.1], 0.75) == [1, 0]
    assert set_of(calibration, [0.35, 0.55, 0.1], 0.5) == [], "none is as sure as 80 %"
    assert set_of(calibration, [0.2, 0.6, 0.2], 0.8) == [1, 0, 2], "3 images exclude nothing at 80 %"
    assert calibration.informs(0.75)
    assert not calibration.informs(0.8)


@pytest.mark.parametrize(
    ("count", "usual"), [(3, 0.8), (4, 0.8), (8, 0.8), (9, 0.9), (18, 0.9), (19, 0.95), (99, 0.95)]
)
def test_the_usual_level_is_one_that_the_images_support(count: int, usual: float) -> None:
    calibration = Calibration((0.5,) * count, (1.0,) * count)
    assert calibration.usual_level == usual
    assert calibration.informs(usual) == (count >= 4)
    remedy = calibration.remedy(None)
    assert remedy == (
        f"95 % takes 19 validation images, and there are {count}: `likethat calibrate RUN --data DATA` takes more"
        if count < 19
        else ""
    )
    assert ("takes 99 validation" in calibration.remedy(0.99)) == (count < 99)
    assert calibration.remedy(0.5) == ""


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0, math.nan])
def test_levels_are_shares(level: float) -> None:
    with pytest.raises(UserError, match=r"between 0 and 1.*0\.95"):
        Calibration((0.5,), (1.0,)).is_unlike(1.0, level)


@pytest.mark.parametrize(("count", "level"), [(24, 0.8), (24, 0.95), (200, 0.9)])
def test_promises_are_kept_on_average_and_not_by_far_too_much(count: int, level: float) -> None:
    """Exchangeable pictures of a noisy model: coverage lies between the level and the level + 1 / (n + 1)."""
    torch.manual_seed(count)
    trials, classes = 3000, 5
    label_N = torch.randint(classes, (trials * (count + 1),))
    logits_NK = 1.5 * torch.randn(len(label_N), classes) + 2 * torch.nn.functional.one_hot(label_N, classes)
    covered, false_alarms = 0, 0
    for logits_nK, label_n in zip(logits_NK.split(count + 1), label_N.split(count + 1), strict=True):
        calibration = fit_calibration(logits_nK[1:], label_n[1:])
        probabilities = logits_nK[0].double().softmax(0).tolist()
        covered += int(label_n[0]) in set_of(calibration, probabilities, level)
        false_alarms += calibration.is_unlike(float(logits_nK[0].max()), level)
    error = 4 * math.sqrt(level * (1 - level) / trials)
    assert level - error <= covered / trials <= level + 1 / (count + 1) + error
    assert 1 - level - 1 / (count + 1) - error <= false_alarms / trials <= 1 - level + error


def test_sentences() -> None:
    assert verdict_of().sentence() == "Only owl remains plausible at 95 %"
    assert verdict_of(level=0.995, classes=("owl", "tit")).sentence() == "One of these 2 at 99.5 %: owl, tit"
    many = verdict_of(classes=tuple("abcdef"))
    assert many.sentence() == "One of these 6 at 95 %: a, b, c, d and 2 more"
    assert "Too few" in verdict_of(informed=False, classes=tuple("abc")).sentence()
    for abstaining in (verdict_of(unlike=True), verdict_of(classes=())):
        assert abstaining.abstains
        assert abstaining.sentence().endswith("the model abstains. Nearest is red crown of wren")
    assert not many.abstains


# --- runs ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibration")
    make_tiny_run(folder)
    shutil.copytree(folder / "run", folder / "bare")
    (folder / "bare" / "calibration.json").unlink()
    return folder


def literal_calibration(run: Path, birds: Path) -> tuple[list[float], list[float]]:
    """Picture by picture, by what the run says of each validation image."""
    model = load(run, "cpu")
    wrong, likeness = [], []
    for picture in sorted((birds / "val").rglob("*.jpg")):
        wrong.append(1 - model.predict(picture).probabilities[picture.parent.name])
        likeness.append(float(summed_logits(model.outputs([model.prepare(picture)])).max()))
    assert len(wrong) == 9
    return sorted(wrong), sorted(likeness)


def check_calibration(run: Path, birds: Path) -> None:
    found = read_calibration(run)
    assert found is not None
    wrong, likeness = literal_calibration(run, birds)
    assert found.nonconformity == pytest.approx(wrong, abs=1e-5)
    assert found.likeness == pytest.approx(likeness, abs=1e-4)


def test_runs_of_every_kind_are_calibrated_on_their_validation_images(folder: Path) -> None:
    run, birds = folder / "run", folder / "birds"
    check_calibration(run, birds)
    assert main(["prune", str(run), "--out", str(folder / "pruned"), "--keep-one"]) == 0
    check_calibration(folder / "pruned", birds)
    assert main(["combine", str(run), str(folder / "pruned"), "--out", str(folder / "both")]) == 0
    check_calibration(folder / "both", birds)
    assert read_calibration(folder / "both" / "members" / "1") == read_calibration(folder / "pruned")
    assert describe_run(run)["calibrated_on"] == 9
    assert "calibrated_on" not in describe_run(folder / "bare")
    assert main(["prune", str(folder / "both"), "--out", str(folder / "few"), "--budget", "20"]) == 0
    check_calibration(folder / "few", birds)
    check_calibration(folder / "few" / "members" / "0", birds)
    with open_editor(run, device="cpu") as editor:
        editor.ban(0)
        live = editor.classifier.calibration
        nearest = {editor.classifier.predict(picture).verdict.nearest for picture in birds.rglob("*.jpg")}
        editor.save(folder / "edited")
    check_calibration(folder / "edited", birds)
    assert live == read_calibration(folder / "edited")
    assert len(nearest) > 1
    assert nearest <= set(range(1, 9)), "numbers of the opened run, without the banned one"


def test_images_that_one_of_two_networks_knows_calibrate_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The split of a folder without parts depends on the seed; only the test images are the same here."""
    data = tmp_path / "data"
    shutil.copytree(folder / "birds", data)
    for picture in (data / "val").rglob("*.jpg"):
        picture.rename(data / "train" / picture.parent.name / f"v{picture.name}")
    shutil.rmtree(data / "val")
    for seed in (0, 1):
        assert main(["train", str(data), "--out", str(tmp_path / f"{seed}"), *DEFAULT, "--seed", str(seed)]) == 0
    assert main(["combine", str(tmp_path / "0"), str(tmp_path / "1"), "--out", str(tmp_path / "both")]) == 0
    assert "without calibration" in capsys.readouterr().err
    assert load(tmp_path / "both", "cpu").calibration is None
    assert main(["calibrate", str(tmp_path / "both")]) == 2
    assert "different validation images" in capsys.readouterr().err
    assert main(["calibrate", str(tmp_path / "both"), "--data", str(make_tiny_birds(tmp_path / "new", seed=5))]) == 0
    assert load(tmp_path / "both", "cpu").calibration is not None


def test_calibrating_again_gives_the_same_and_other_images_another(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(folder / "bare", tmp_path / "run")
    assert main(["calibrate", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((run / "calibration.json").read_text())
    first = read_calibration(folder / "run")
    assert first is not None
    assert document["nonconformity"] == pytest.approx(first.nonconformity, abs=1e-6)
    assert main(["calibrate", str(run), "--data", str(make_tiny_birds(tmp_path / "new", seed=3))]) == 0
    assert "36 images" in capsys.readouterr().out, "all parts of data that the run has not seen"
    found = read_calibration(run)
    assert found is not None
    assert len(found.likeness) == 36


def predicted(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert main(["predict", *map(str, arguments), "--json"]) == 0
    images: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["images"]
    return images


def test_predict_tells_the_set_and_the_nearest_prototype(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = sorted((folder / "birds" / "test").rglob("*.jpg"))
    calibration, model = read_calibration(folder / "run"), load(folder / "run", "cpu")
    assert calibration is not None
    answers = predicted(capsys, folder / "run", *pictures, "--level", 0.9)
    limit = 1 - sorted(calibration.nonconformity)[9 - 1]  # ceil(10 x 0.9) = 9
    for picture, answer in zip(pictures, answers, strict=True):
        verdict, output = answer["verdict"], model.outputs([model.prepare(picture)])[0]
        likely = sorted(answer["probabilities"].items(), key=lambda item: -item[1])
        assert verdict["prediction_set"] == [name for name, share in likely if share >= limit - 1e-12]
        nearest = int(output.score_BP[0].argmax())
        assert verdict["nearest"]["prototype"] == nearest
        assert verdict["nearest"]["class"] == model.prototypes[nearest].class_name
        assert verdict["likeness"] == pytest.approx(float(output.logits_BK.max()), abs=1e-4)
        assert verdict["unlike"] == (verdict["likeness"] < min(calibration.likeness))
        assert verdict["abstains"] == (verdict["unlike"] or not verdict["prediction_set"])
    bare = predicted(capsys, folder / "bare", *pictures)
    assert bare == [{key: value for key, value in answer.items() if key != "verdict"} for answer in answers]
    known = next(path for path, answer in zip(pictures, answers, strict=True) if not answer["verdict"]["abstains"])
    assert main(["predict", str(folder / "run"), str(known)]) == 0
    told = capsys.readouterr().out
    assert "at 90 %" in told, "9 validation images support no more"
    assert "95 % takes 19 validation images, and there are 9: `likethat calibrate RUN --data DATA`" in told
    assert "Too few" not in told


def test_a_picture_unlike_all_is_said_to_be_so(folder: Path, tmp_path: Path) -> None:
    """The same run, with validation images that were all more familiar than any picture can be."""
    run = shutil.copytree(folder / "run", tmp_path / "run")
    document = json.loads((run / "calibration.json").read_text())
    (run / "calibration.json").write_text(json.dumps({**document, "likeness": [1e6] * 9}))
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    explanation = explain(load(run, "cpu"), noise, level=0.9)
    assert explanation.verdict is not None
    assert explanation.verdict.unlike
    assert explanation.verdict.nearest == explanation.nearest[0].prototype.id
    assert explanation.to_dict()["verdict"] == explanation.verdict.to_dict()
    page = explanation.save(tmp_path / "why.html").read_text()
    assert explanation.verdict.sentence() in page
    assert "The nearest class is" in page
    known = explain(load(folder / "run", "cpu"), noise, level=0.99)
    assert "This picture looks like" in known.save(tmp_path / "known.html").read_text()
    head = (slice(350, 390), slice(400, None))  # of the sheet: the line with the verdict
    bare = np.asarray(explain(load(folder / "bare", "cpu"), noise).figure(long=True))[head]
    assert (bare == 255).all()
    assert (np.asarray(explanation.figure(long=True))[head] != 255).any()


@pytest.mark.parametrize("preset", [DEFAULT, PAPER], ids=["cosine", "log"])
def test_what_the_model_was_made_of_is_known(tmp_path: Path, preset: list[str]) -> None:
    """Sources of prototypes are no strangers, even where every validation image is more familiar and surer."""
    birds, model = tmp_path / "birds", load(make_tiny_run(tmp_path, preset), "cpu")
    model.calibration = Calibration((-1.0,) * 99, (1e6,) * 99)
    for path in {prototype.path for prototype in model.prototypes}:
        prediction = model.predict(birds / path)
        assert not prediction.verdict.unlike
        assert prediction.verdict.classes == (prediction.class_name,)
    others = [path for path in (birds / "test").rglob("*.jpg") if model.predict(path).verdict.unlike]
    assert len(others) == len(list((birds / "test").rglob("*.jpg"))), "all other pictures are"


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"nonconformity": [0.1], "likeness": []}', '{"nonconformity": [NaN], "likeness": [1]}', "[]"]
)
def test_a_damaged_file_is_told(folder: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(folder / "run", tmp_path / "run")
    (run / "calibration.json").write_text(text)
    picture = next((folder / "birds").rglob("*.jpg"))
    assert main(["predict", str(run), str(picture)]) == 2
    assert "calibration.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["predict", "explain"])
def test_levels_that_cannot_be_promised_are_refused(
    folder: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, out = next((folder / "birds").rglob("*.jpg")), tmp_path / "out"
    extra = ["--out", str(out)] if verb == "explain" else []
    for run, level, remedy in (("run", 95, "between 0 and 1"), ("bare", 0.9, f"calibrate {folder / 'bare'}")):
        assert main([verb, str(folder / run), str(picture), "--level", str(level), *extra]) == 2
        shown = capsys.readouterr()
        assert remedy in shown.err
        assert shown.out == ""
        assert not out.exists()
