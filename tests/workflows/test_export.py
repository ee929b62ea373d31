"""Exported models: the same numbers without PyTorch, and an explanation from the file alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from helpers.explain_run import make_run
from helpers.interrupted import limit_files
from helpers.runs import DEFAULT, PAPER, TINY, likethat, make_tiny_birds

from likethat.cli.parser import main
from likethat.models.protopnet import summed_logits
from likethat.runs.classifier import load
from likethat.workflows import export as export_workflow

EXAMPLE = Path(__file__).parents[2] / "examples" / "explain_onnx.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with pictures that are not square, edited so that it has a name and classes of different size."""
    folder = tmp_path_factory.mktemp("export")
    birds = make_tiny_birds(folder / "birds")
    arguments = [*DEFAULT, "--input-size", "64x96"]
    assert main(["train", str(birds), "--out", str(folder / "trained"), *arguments]) == 0
    edits = ["--ban", "4", "--name", "0", "<crown>"]
    assert main(["edit", str(folder / "trained"), *edits, "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def told(run: Path) -> dict[str, Any]:
    """What the command says about its file."""
    done = likethat("export", run, "--format", "onnx", "--out", run.parent / "model.onnx", "--json")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture(scope="module")
def exported(told: dict[str, Any]) -> Path:
    return Path(told["file"])


def pictures_of(run: Path) -> list[Path]:
    return sorted((run.parent / "birds" / "test").rglob("*.jpg"))


def test_onnx_gives_what_pytorch_gives(run: Path, exported: Path) -> None:
    classifier = load(run, "cpu")
    session = onnxruntime.InferenceSession(str(exported), providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["logits", "scores", "maps", "distances"]
    assert session.get_inputs()[0].shape == ["batch", 3, 64, 96]
    prepared = [classifier.prepare(path) for path in pictures_of(run)]
    for size in (1, 2, 7):
        x = torch.stack([picture.pixels[0] for picture in prepared[:size]]).float() / 255
        found = session.run(None, {"pictures": x.numpy()})
        (output,) = classifier.outputs(prepared[:size])
        for name, value in zip(("logits_BK", "score_BP", "similarity_BPHW", "distance_BPHW"), found, strict=True):
            expected = getattr(output, name).numpy()
            assert value.shape == expected.shape
            assert np.abs(value - expected).max() < 1e-4


def test_the_largest_difference_is_told(told: dict[str, Any]) -> None:
    assert set(told["max_difference"]) == {"logits", "scores", "maps", "distances"}
    assert 0 < max(told["max_difference"].values()) < 1e-4
    assert (told["pictures"], told["from"]) == (8, "test images")
    assert told["bytes"] == Path(told["file"]).stat().st_size


def test_torch_program(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.pt2"
    assert main(["export", str(run), "--format", "torch", "--out", str(file), "--json"]) == 0
    assert max(json.loads(capsys.readouterr().out)["max_difference"].values()) < 1e-4
    extra: dict[str, Any] = {"likethat.json": ""}
    program = torch.export.load(file, extra_files=extra).module()
    classifier = load(run, "cpu")
    assert json.loads(extra["likethat.json"]) == json.loads(json.dumps(export_workflow.describe(classifier)))
    prepared = [classifier.prepare(path) for path in pictures_of(run)[:3]]
    logits = program(torch.stack([picture.pixels[0] for picture in prepared]).float() / 255)[0]
    assert torch.allclose(logits, summed_logits(classifier.outputs(prepared)), atol=1e-4)


def test_the_example_explains_like_the_command(run: Path, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 65
    capsys.readouterr()
    for path in pictures_of(run)[::4]:
        command = [sys.executable, str(EXAMPLE), str(exported), str(path)]
        told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert main(["explain", str(run), str(path), "--json", "--device", "cpu"]) == 0
        (expected,) = json.loads(capsys.readouterr().out)["images"]
        del expected["sheet"], expected["verdict"]  # a picture file, and what calibration promises
        del expected["against"], expected["difference"], expected["difference_groups"]  # the example compares nothing
        for sheet in expected["classes"]:
            del sheet["groups"]  # the same rows once more, summed up
        _assert_alike(told, expected)
        assert {row["name"] for sheet in told["classes"] for row in sheet["rows"]} == {"<crown>", None}


def _assert_alike(found: Any, expected: Any) -> None:
    """The same document, numbers up to rounding."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            _assert_alike(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_alike(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4)
    else:
        assert found == expected


def test_the_example_needs_neither_torch_nor_likethat() -> None:
    code = "import sys, explain_onnx; print({'torch', 'likethat'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=EXAMPLE.parent)
    assert shown.stdout.strip() == "set()"


def test_the_file_says_how_pictures_are_prepared(run: Path, exported: Path) -> None:
    session = onnxruntime.InferenceSession(str(exported))
    document = json.loads(session.get_modelmeta().custom_metadata_map["likethat"])
    classifier = load(run, "cpu")
    assert document["classes"] == list(classifier.classes)
    assert document["preprocessing"]["size"] == [64, 96]
    assert document["preprocessing"]["mean"] == [0.5, 0.5, 0.5]
    weight_KP = torch.zeros_like(classifier.weight_KP)
    for k, connections in enumerate(document["connections"]):
        for p, weight in connections:
            weight_KP[k, p] = weight
    assert torch.equal(weight_KP, classifier.weight_KP)
    facts = document["prototypes"][0]
    assert (facts["name"], facts["path"]) == ("<crown>", classifier.prototypes[0].path)


def test_a_run_of_the_paper_whose_data_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    birds = make_tiny_birds(tmp_path / "birds")
    assert main(["train", str(birds), "--out", str(tmp_path / "run"), *PAPER]) == 0
    shutil.rmtree(birds)
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), "--format", "onnx", "--out", str(tmp_path / "m.onnx"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["from"] == "mirrored pictures of prototypes"


def test_a_backbone_of_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_run(tmp_path, backbone="test_vit", input_size=160, similarity="cosine")
    shutil.rmtree(made.root)
    assert main(["export", str(made.path), "--format", "onnx", "--out", str(tmp_path / "m.onnx"), "--json"]) == 0
    assert max(json.loads(capsys.readouterr().out)["max_difference"].values()) < 1e-4


def test_what_differs_is_not_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export_workflow, "LIMIT", -1.0)
    assert main(["export", str(run), "--format", "torch", "--out", str(tmp_path / "m.pt2")]) == 1
    assert "differs from PyTorch on test images: logits" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*arguments: object) -> str:
        assert main(["export", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "onnx or torch, not as tflite" in told(run, "--format", "tflite", "--out", tmp_path / "m")
    (tmp_path / "file").write_text("")
    assert "could not be written" in told(run, "--format", "torch", "--out", tmp_path / "file" / "m")
    (tmp_path / "file").unlink()
    assert "is a folder" in told(run, "--format", "onnx", "--out", tmp_path)
    both = run.parent / "both"
    assert main(["combine", str(run), str(run.parent / "trained"), "--out", str(both)]) == 0
    assert "export each of its members" in told(both, "--format", "onnx", "--out", tmp_path / "m")
    baseline = run.parent / "baseline"
    assert main(["baseline", str(run.parent / "birds"), "--out", str(baseline), *TINY, "--baseline-epochs", "1"]) == 0
    assert "is a baseline" in told(baseline, "--format", "onnx", "--out", tmp_path / "m")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "likethat[export]" in told(run, "--format", "onnx", "--out", tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["torch", "onnx"])
def test_a_full_disk_gets_a_sentence_and_leaves_no_file(tmp_path: Path, format: str) -> None:
    """A file size limit stands for the full disk."""
    run, out = make_run(tmp_path).path, tmp_path / "model"
    shutil.rmtree(tmp_path / "data")  # it is then checked on the prototypes' own pictures
    limit = partial(limit_files, 100_000)
    done = likethat("export", run, "--format", format, "--out", out, check=2, before=limit)
    assert done.stderr.splitlines()[-1].startswith(f"likethat: {out} could not be written (File too large)")
    assert "cannot export" not in done.stderr
    assert not out.exists()
