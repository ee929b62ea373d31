"""The page for radiologists: its commands run as they stand, on the slices that its example draws."""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path

import pytest
from helpers.runs import TINY

from likethat.cli.parser import main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "radiologists.md"


def test_the_commands_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line.strip() for line in PAGE.read_text().splitlines() if line.startswith("    ")]
    commands = [shlex.split(line) for line in lines if line.startswith(("likethat ", "python "))]
    assert [words[1] for words in commands if words[0] == "likethat"] == [
        *("data", "data", "train", "explain", "predict", "serve", "evaluate", "calibrate")
    ]
    monkeypatch.chdir(tmp_path)
    shown = ""
    for program, first, *words in commands:
        if program == "python":
            monkeypatch.setattr("sys.argv", [first, *words])
            runpy.run_path(str(ROOT / first), run_name="__main__")
        elif first != "serve":
            tiny = TINY if first == "train" else ["--device", "cpu"] if first != "data" else []
            assert main([first, *words, *tiny]) == 0, words
        shown += "".join(capsys.readouterr())
    assert "Doe" not in shown
    for line in lines:  # what the page says that a command prints
        if line.startswith(("note: ", "table: ")):
            assert line in shown
