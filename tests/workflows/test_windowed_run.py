"""A run whose cells see windows goes through every verb like any other, and says what its boxes are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import DEFAULT, likethat, make_tiny_birds
from PIL import Image

from likethat.cli.parser import main
from likethat.explaining.boxes import SEEN_ALONE
from likethat.runs.classifier import load
from likethat.workflows.edit.editor import open_editor

EXAMPLE = Path(__file__).parents[2] / "examples" / "explain_onnx.py"
WINDOWS = ["--windows", "32,16"]  # of the 64 pixels of a side: 3 x 3
CORNERS = {(16.0 * column, 16.0 * row) for row in range(3) for column in range(3)}


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_birds(tmp_path_factory.mktemp("windowed") / "birds")


@pytest.fixture(scope="module")
def run(birds: Path) -> Path:
    folder = birds.parent / "run"
    assert main(["train", str(birds), "--out", str(folder), *DEFAULT, *WINDOWS]) == 0
    return folder


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*map(str, arguments), "--device", "cpu", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def assert_windows(run: Path) -> None:
    """The data's pictures are as large as the network's, so that boxes are windows pixel by pixel."""
    for prototype in load(run, "cpu").prototypes:
        x0, y0, x1, y1 = prototype.box
        assert (x0, y0) in CORNERS
        assert (x1, y1) == (x0 + 32, y0 + 32)


def test_the_boxes_are_proven(run: Path) -> None:
    shown = likethat("verify", run, "--device", "cpu").stdout
    assert "boxes: proven: everything outside the boxes replaced by other pictures, 9 prototypes in" in shown
    assert "similarities change by at most 0.0e+00 (equal to the last bit)" in shown
    assert_windows(run)
    report = (run / "report.html").read_text()
    assert report.count(SEEN_ALONE) == 2
    assert "most active pixels" not in report


def test_an_exported_model_has_the_same_boxes(run: Path, birds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = next((birds / "test").rglob("*.jpg"))
    expected = told(capsys, "explain", run, picture)["images"][0]
    boxes = [tuple(row["box"]) for sheet in expected["classes"] for row in sheet["rows"]]
    assert {(x0, y0) for x0, y0, _, _ in boxes} <= CORNERS
    assert {(x1 - x0, y1 - y0) for x0, y0, x1, y1 in boxes} == {(32, 32)}
    for format in ("torch", "onnx"):
        file = run.parent / f"model.{format}"
        document = told_export(capsys, run, format, file)
        assert max(document["max_difference"].values()) < 1e-4
    done = subprocess.run([sys.executable, EXAMPLE, file, picture], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert [[row["prototype"] for row in sheet["rows"]] for sheet in found["classes"]] == [
        [row["prototype"] for row in sheet["rows"]] for sheet in expected["classes"]
    ]
    assert [tuple(row["box"]) for sheet in found["classes"] for row in sheet["rows"]] == boxes


def told_export(capsys: pytest.CaptureFixture[str], run: Path, format: str, file: Path) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["export", str(run), "--format", format, "--out", str(file), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_pictures_of_the_sheet_and_of_other_methods(run: Path, birds: Path, tmp_path: Path) -> None:
    picture = next((birds / "test").rglob("*.jpg"))
    out = ["--out", str(tmp_path), "--device", "cpu"]
    assert main(["explain", str(run), str(picture), *out, "--attribution", "gradient"]) == 0
    assert SEEN_ALONE in next(tmp_path.glob("*.html")).read_text()
    with Image.open(next(tmp_path.glob("*.png"))) as sheet:
        assert sheet.width > 1000


def test_atlas_and_metrics(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["atlas", str(run), "--k", "2", "--device", "cpu"]) == 0
    atlas = json.loads((run / "atlas" / "atlas.json").read_text())
    boxes = [neighbour["box"] for entry in atlas["prototypes"] for neighbour in entry["train"]]
    assert {(x0, y0) for x0, y0, _, _ in boxes} <= CORNERS
    assert "all that the model has seen" in (run / "atlas" / "index.html").read_text()
    document = told(capsys, "evaluate", run, "--interpretability")
    figures = {figure["name"]: figure["value"] for figure in document["figures"]}
    # Gradients, and what survives in another picture: all of it lies in the box.
    assert figures["gradient energy inside the box"] == 1
    assert figures["similarity kept in another picture"] == pytest.approx(1, abs=1e-6)


def test_what_is_made_of_it_is_proven_too(run: Path, birds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = {name: run.parent / name for name in ("pruned", "edited", "both")}
    assert main(["prune", str(run), "--out", str(made["pruned"]), "--keep-one", "--device", "cpu"]) == 0
    assert main(["edit", str(run), "--ban", "4", "--out", str(made["edited"]), "--device", "cpu"]) == 0
    assert main(["combine", str(run), str(made["edited"]), "--out", str(made["both"]), "--device", "cpu"]) == 0
    for folder in made.values():
        verification = told(capsys, "verify", folder)
        assert verification["passed"]
        assert verification["boxes"]["max_change"] == 0
        assert_windows(folder)
    assert load(made["both"], "cpu").sees_windows


def test_a_candidate_of_an_edit_is_a_window(run: Path) -> None:
    with open_editor(run, device="cpu") as editor:
        for candidate in editor.candidates(0, 3):
            _, share = editor.picture(candidate)
            x0, y0 = candidate.patch.column * 16 / 64, candidate.patch.row * 16 / 64
            assert share == pytest.approx((x0, y0, x0 + 0.5, y0 + 0.5))


def test_baselines_have_windows_too(run: Path, birds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline, out = run.parent / "baseline", run.parent / "from-baseline"
    assert main(["baseline", str(birds), "--out", str(baseline), *DEFAULT, *WINDOWS]) == 0
    picture = next((birds / "test").rglob("*.jpg"))
    figure = run.parent / "compared.png"
    assert main(["compare", str(run), str(baseline), str(picture), "--out", str(figure), "--device", "cpu"]) == 0
    plain = [*DEFAULT, "--from-baseline", str(baseline)]
    assert main(["train", str(birds), "--out", str(out), *plain]) == 2
    assert "was trained with --windows 32,16; pass the same" in capsys.readouterr().err
    assert main(["train", str(birds), "--out", str(out), *plain, *WINDOWS, "--joint-epochs", "1"]) == 0
    assert load(out, "cpu").networks[0].backbone.map_size == (3, 3)


def test_windows_that_leave_pixels_out_are_refused_before_any_work(
    birds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(birds), "--out", str(tmp_path / "run"), *DEFAULT, "--windows", "32,20"]) == 2
    assert "take 32,16 or 24,20" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
