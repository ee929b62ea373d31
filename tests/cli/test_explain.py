"""`likethat explain`: many files after one load, what is no picture told, nothing left half."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers.runs import make_tiny_run
from PIL import Image

import likethat as package
from likethat.cli.parser import main
from likethat.data.pictures import find_pictures
from likethat.explaining import files
from likethat.explaining.explanation import Explanation, explain
from likethat.explaining.files import explain_files, sheet_names


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("explain"))


@pytest.fixture(scope="module")
def pictures(run: Path) -> list[Path]:
    return sorted((run.parent / "birds" / "test").rglob("*.jpg"))


def explained(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, list[dict[str, object]]]:
    assert main(["explain", *map(str, arguments), "--device", "cpu", "--json"]) == 0
    document: dict[str, list[dict[str, object]]] = json.loads(capsys.readouterr().out)
    return document


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["explain", *map(str, arguments), "--device", "cpu"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_the_public_name_is_the_function(run: Path, pictures: list[Path]) -> None:
    explanation = package.explain(package.load(run, "cpu"), pictures[0])
    assert isinstance(explanation, Explanation)
    assert explanation.path == str(pictures[0])


def test_json_alone_writes_nothing(
    run: Path, pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    document = explained(capsys, run, pictures[0], "--top-classes", 2, "--maps")
    expected = explain(package.load(run, "cpu"), pictures[0], top_classes=2)
    (image,) = document["images"]
    assert image == {**json.loads(json.dumps(expected.to_dict(maps=True))), "sheet": None}
    assert document["skipped"] == []
    assert list(tmp_path.iterdir()) == []


def test_batches_and_folders_give_what_single_pictures_give(
    run: Path, pictures: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BATCH", 4)
    classifier = package.load(run, "cpu")
    found, skipped = find_pictures([str(run.parent / "birds" / "test"), str(pictures[0])])
    assert found == [str(path) for path in pictures], "all, in order, each once"
    assert skipped == []
    steps: list[tuple[int, int]] = []
    answers = list(explain_files(classifier, found, advance=lambda *step: steps.append(step)))
    assert steps == [(4, 9), (8, 9), (9, 9)]
    for path, answer in zip(pictures, answers, strict=True):
        single = explain(classifier, path)
        assert isinstance(answer, Explanation)
        assert answer.path == str(path)
        assert answer.predicted.name == single.predicted.name
        assert answer.predicted.logit == pytest.approx(single.predicted.logit, abs=1e-4)
        assert [match.box for match in answer.nearest] == [match.box for match in single.nearest]


def test_boxes_stay_in_the_files_pixels_though_large_pictures_are_shrunk(run: Path, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 50, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(noise).resize((2000, 1200), Image.Resampling.BICUBIC).save(tmp_path / "a.jpg", exif=exif)
    classifier = package.load(run, "cpu")
    (answer,) = explain_files(classifier, [str(tmp_path / "a.jpg")])
    assert isinstance(answer, Explanation)
    assert answer.picture.size == (384, 640)
    single = explain(classifier, tmp_path / "a.jpg")
    assert single.picture.size == (1200, 2000)
    assert [row.match.box for row in answer.predicted.rows] == [row.match.box for row in single.predicted.rows]


def test_what_is_no_picture_is_told_and_the_rest_done(
    run: Path, pictures: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    (folder / "deep").mkdir(parents=True)
    (folder / "notes.txt").write_text("a robin")
    (folder / "web.png").write_text("<!doctype html>")
    (folder / "deep" / "cut.jpg").write_bytes(pictures[0].read_bytes()[:-500])
    Image.new("RGB", (30_000, 2)).save(folder / "wide.png")
    Image.new("RGB", (1, 1), "red").save(folder / "dot.png")
    shutil.copy(pictures[0], folder / "deep" / "good.JPG")
    shutil.copytree(run, folder / "deep" / "run")  # with pictures of prototypes
    (tmp_path / "empty").mkdir()
    named = (tmp_path / "gone.jpg", tmp_path / "empty", folder, folder / "notes.txt")
    assert main(["explain", str(run), *map(str, named), "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    document = json.loads((tmp_path / "out" / "explanations.json").read_text())
    assert [image["path"] for image in document["images"]] == [
        str(folder / "deep" / "good.JPG"),
        str(folder / "dot.png"),
    ]
    reasons = {entry["path"]: entry["reason"] for entry in document["skipped"]}
    assert set(reasons) == {
        *(str(path) for path in named[:2]),
        *(str(folder / name) for name in ("notes.txt", "web.png", "deep/cut.jpg", "deep/run", "wide.png")),
    }
    assert "cannot be opened" in reasons[str(named[0])]
    assert "empty" in reasons[str(named[1])]
    assert "web page" in reasons[str(folder / "web.png")]
    assert "too early" in reasons[str(folder / "deep/cut.jpg")]
    assert "likethat made" in reasons[str(folder / "deep/run")]
    assert "20,000 pixels" in reasons[str(folder / "wide.png")]
    lines = [line for line in shown.err.splitlines() if line.startswith("likethat: skipped ")]
    assert len(lines) == len(document["skipped"]) == 8, "notes.txt is told of twice: in the folder, and by name"
    assert f"Page: {tmp_path / 'out' / 'explanations.html'}" in shown.out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("explanations.html", "explanations.json", "good.png", "dot.png")
    }


def test_the_colours_reach_page_and_sheet(run: Path, pictures: list[Path], tmp_path: Path) -> None:
    made = {}
    for colours in ("ember", "jet"):
        out = tmp_path / colours
        options = ["--device", "cpu", "--colours", colours, "--long", "--out", str(out)]
        assert main(["explain", str(run), str(pictures[0]), *options]) == 0
        made[colours] = out
    sheets = [np.asarray(Image.open(made[c] / f"{pictures[0].stem}.png")).astype(int) for c in made]
    explanation = explain(package.load(run, "cpu"), pictures[0])
    assert np.array_equal(sheets[0], np.asarray(explanation.figure(long=True)))
    assert np.array_equal(sheets[1], np.asarray(explanation.figure("jet", long=True)))
    assert (sheets[0] != sheets[1]).any()
    pages = [(made[c] / "explanations.html").read_text() for c in made]
    heats = [[line for line in page.splitlines() if "data:image/webp" in line] for page in pages]
    assert len(heats[0]) == len(heats[1]) > 3
    assert all(first != second for first, second in zip(*heats, strict=True))


def test_sheets_are_pages_of_a_size_to_mail_and_pdf_on_request(
    run: Path, pictures: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, option in enumerate(("--out", "--pdf", "--long")):
        out = tmp_path / str(number)
        options = ["--out", str(out)] if option == "--out" else [option, "--out", str(out)]
        assert main(["explain", str(run), str(pictures[0]), "--device", "cpu", *options]) == 0
    capsys.readouterr()
    stem = pictures[0].stem
    page, long = (Image.open(tmp_path / name / f"{stem}.png") for name in ("0", "2"))
    assert (tmp_path / "0" / f"{stem}.png").stat().st_size <= 500_000
    assert page.height / page.width <= 297 / 210 < long.height / long.width
    assert (tmp_path / "1" / f"{stem}.pdf").read_bytes().startswith(b"%PDF-")
    assert not list((tmp_path / "1").glob("*.png"))
    (image,) = json.loads((tmp_path / "1" / "explanations.json").read_text())["images"]
    assert image["sheet"] == f"{stem}.pdf"


def test_noise_is_explained_too(run: Path, tmp_path: Path) -> None:
    """The hardest picture to compress."""
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    explanation = explain(package.load(run, "cpu"), Image.fromarray(noise))
    assert explanation.save(tmp_path / "noise.html").stat().st_size > 100_000


def test_folders_are_replaced_on_request_only(
    run: Path, pictures: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, mine = tmp_path / "out", tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.doc").write_text("years of work")
    command = [str(run), str(pictures[0]), "--out"]
    assert main(["explain", *command, str(out), "--device", "cpu"]) == 0
    capsys.readouterr()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert "--overwrite" in refused(capsys, *command, out)
    assert "not replaced" in refused(capsys, *command, mine, "--overwrite")
    assert "is a file" in refused(capsys, *command, mine / "thesis.doc")
    # A failure half way leaves what was there, and nothing beside it.
    assert "no class called" in refused(capsys, *command, out, "--overwrite", "--against", "nobody")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"out", "mine"}
    assert main(["explain", str(run), str(pictures[1]), "--out", str(out), "--overwrite", "--device", "cpu"]) == 0
    assert json.loads((out / "explanations.json").read_text())["images"][0]["path"] == str(pictures[1])
    assert {path.name for path in tmp_path.iterdir()} == {"out", "mine"}


def test_mistakes_get_a_sentence(
    run: Path, pictures: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = package.load(run, "cpu").classes[1]
    out = ("--out", tmp_path / "out")
    message = refused(capsys, run, pictures[0], "--against", name[:-2], *out)
    assert f"did you mean {name}" in message
    assert "Traceback" not in message
    assert "At least 1 class" in refused(capsys, run, pictures[0], "--top-classes", 0, *out)
    (tmp_path / "notes.txt").write_text("a robin")
    message = refused(capsys, run, tmp_path / "notes.txt", *out)
    assert "Nothing was explained" in message
    assert "notes.txt: not a readable" in message
    assert "invalid choice" in refused(capsys, run, pictures[0], "--colours", "puce", *out)
    unfinished = shutil.copytree(run, tmp_path / "unfinished")
    (unfinished / "model.safetensors").unlink()
    assert "unfinished" in refused(capsys, unfinished, pictures[0], *out)
    assert not (tmp_path / "out").exists()


def test_sheets_have_names_of_their_own() -> None:
    paths = [
        "/d/owl/1.jpg",
        "/d/wren/1.png",
        "/d/owl/2.jpg",
        "/d/wren/1.jpg",
        "/e/Robin.jpg",
        "/f/robin.jpg",
        "/d/ü.png",
    ]
    assert list(sheet_names(paths).values()) == [
        *("owl-1.png", "wren-1.png", "2.png", "wren-1-2.png", "e-Robin.png", "f-robin.png", "ü.png")
    ]


def test_folders_are_predicted_and_a_second_explanation_gets_a_folder_of_its_own(
    run: Path, pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "pictures" / "deep"
    folder.mkdir(parents=True)
    for number, path in enumerate(pictures[:2]):
        shutil.copy(path, folder / f"{number}{path.suffix}")
    (folder / "notes.txt").write_text("no picture")
    assert main(["predict", str(run), str(tmp_path / "pictures"), "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [Path(image["path"]).stem for image in document["images"]] == ["0", "1"]
    assert [Path(entry["path"]).name for entry in document["skipped"]] == ["notes.txt"]
    monkeypatch.chdir(tmp_path)
    for name in ("explanations", "explanations-2", "explanations-3"):
        assert main(["explain", str(run), str(pictures[0]), "--device", "cpu"]) == 0
        assert (tmp_path / name / "explanations.html").is_file()


def test_a_printed_explanation_is_a_summary(run: Path, pictures: list[Path]) -> None:
    explanation = explain(package.load(run, "cpu"), pictures[0])
    text = str(explanation)
    assert len(text.splitlines()) <= 10
    assert len(repr(explanation)) < 300
    points = [float(line.split()[0]) for line in text.splitlines() if " points" in line]
    assert sum(points[:-1]) == pytest.approx(points[-1], abs=0.05)
    assert points[-1] == pytest.approx(explanation.difference().logit, abs=0.01)


def test_objects_show_themselves_in_notebooks(run: Path, pictures: list[Path]) -> None:
    classifier = package.load(run, "cpu")
    prediction, explanation = classifier.predict(pictures[0]), explain(classifier, pictures[0])
    page = explanation._repr_html_()
    for html in (classifier._repr_html_(), prediction._repr_html_(), page):
        assert len(html) < 100_000
        ElementTree.fromstring(html)  # every tag is closed
    for name, share in prediction.probabilities.items():
        assert f"{share:.1%}" in prediction._repr_html_()
        assert name in classifier._repr_html_()
    assert prediction.verdict.sentence() in prediction._repr_html_()
    groups = explanation.predicted.main_groups(4)[0]
    assert all(f"{group.points:+.2f}" in page for group in groups)
    assert page.count("<img") == 1 + 2 * len(groups)
    hostile = dataclasses.replace(prediction, class_name="<script>", probabilities={"<script>": 1.0}, verdict=None)
    assert "<script>" not in hostile._repr_html_()
    assert "&lt;script&gt;" in hostile._repr_html_()
