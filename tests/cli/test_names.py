"""Files and classes whose names are not valid UTF-8, or not to be written in the terminal's encoding."""

from __future__ import annotations

import io
import json
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from helpers.names import CLASS, FILE, needs_such_names
from helpers.runs import DEFAULT, likethat, make_tiny_birds

import likethat as package
from likethat.cli.parser import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside its birds: the names of one class and of all files are not valid UTF-8; another class has an umlaut."""
    folder = tmp_path_factory.mktemp("names")
    needs_such_names(folder)
    birds = make_tiny_birds(folder / "birds")
    for picture in list(birds.rglob("*.jpg")):
        picture.rename(picture.with_name(f"{picture.stem}{FILE}.jpg"))
    for part in ("train", "val", "test"):
        for old, new in zip(sorted((birds / part).iterdir()), (CLASS, "K\u00e4uzchen"), strict=False):
            old.rename(old.with_name(new))
    likethat("train", birds, "--out", folder / "run", *DEFAULT)
    return folder / "run"


def said(monkeypatch: pytest.MonkeyPatch, encoding: str, *arguments: object, check: int = 0) -> str:
    """What a command prints where stdout has this encoding and takes nothing else."""
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert main([str(argument) for argument in arguments]) == check
    stdout.flush()
    return stdout.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_every_encoding_of_the_terminal_will_do(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    birds = shutil.copytree(run.parent / "birds", tmp_path / "birds")
    picture = sorted((birds / "test" / CLASS).iterdir())[0]
    cpu, shown = ("--device", "cpu"), f"M\\udcf6we/{picture.stem[:3]}caf\\udce9.jpg"
    assert shown in said(monkeypatch, encoding, "predict", run, picture, *cpu)
    assert shown in said(monkeypatch, encoding, "explain", run, picture, *cpu, "--out", tmp_path / "out")
    assert (tmp_path / "out" / f"{picture.stem}.png").is_file()
    evaluation = said(monkeypatch, encoding, "evaluate", run, *cpu)
    assert "M\\udcf6we" in evaluation
    assert ("K\\xe4uzchen" if encoding == "ascii" else "K\u00e4uzchen") in evaluation
    shutil.copy(picture, birds / "train" / CLASS)
    assert f"problem: test/{shown}: the same file as" in said(monkeypatch, encoding, "data", "check", birds, check=1)
    (image,) = json.loads(said(monkeypatch, encoding, "predict", run, picture, *cpu, "--json"))["images"]
    assert image["path"] == str(picture), "documents have the names as they are"


def test_a_replaced_stdout_is_left_as_it_is(run: Path) -> None:
    with redirect_stdout(io.StringIO()) as stdout:
        assert main(["evaluate", str(run), "--device", "cpu"]) == 0
    assert CLASS in stdout.getvalue()


def test_pages_and_the_card_show_question_marks(run: Path, tmp_path: Path) -> None:
    assert "M?we" in (run / "report.html").read_text(encoding="utf-8")
    model = package.load(run, "cpu")
    given = model.save_pretrained(tmp_path / "given")
    assert "M?we" in (given / "README.md").read_text(encoding="utf-8")
    again = package.Classifier.from_pretrained(given, "cpu")
    assert again.classes == model.classes
    assert CLASS in again.classes
