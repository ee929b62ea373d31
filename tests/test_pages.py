"""The commands of the pages for people run as they stand there, on small data and with a small network."""

from __future__ import annotations

import csv
import importlib.util
import shlex
from pathlib import Path

import pytest
from helpers.runs import QUICK, likethat

from likethat.data.synthetic.field_guide import make_birds

ROOT = Path(__file__).parents[1]


def run_commands(page: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Run the lines of a page that call likethat, but for the one that draws the data; return the verbs."""
    monkeypatch.chdir(folder)
    text = (ROOT / "docs" / page).read_text()
    commands = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("    likethat ")]
    for command in commands:
        if command[:2] == ["data", "synth"]:
            continue
        if command[0] == "train":  # what the page says goes before what makes it fast
            command = [*command[:2], *QUICK, *command[2:], "--input-size", "64"]
        likethat(*command)
    return [command[0] for command in commands]


def test_the_factory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_parts", ROOT / "examples" / "make_parts.py")
    assert spec is not None
    assert spec.loader is not None
    make_parts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_parts)
    make_parts.main(tmp_path / "parts", good=24, scratched=6)
    verbs = run_commands("factory.md", monkeypatch, tmp_path)
    assert verbs == ["data", "train", "evaluate", "predict", "data", "edit"]
    with (tmp_path / "answers.csv").open() as file:
        assert {row["class"] for row in csv.DictReader(file)} == {"good", "scratched"}
    assert (tmp_path / "confusions.html").is_file()


def test_the_field_biologist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_birds(tmp_path / "camera", species=4, train=5, val=2, test=1, size=64)
    verbs = run_commands("field-biologist.md", monkeypatch, tmp_path)
    assert verbs.count("train") == 2
    with (tmp_path / "answers.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4
    for made in ("first/audit/audit.html", "run/atlas/index.html", "why/explanations.html", "better/edits.jsonl"):
        assert (tmp_path / made).is_file()
