"""How often test images were looked at, through all runs that a run was made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.runs import likethat, make_tiny_run

from likethat.cli.parser import main
from likethat.runs import layout
from likethat.runs.looks import count_looks, nth_time
from likethat.workflows.edit.editor import open_editor


def test_words() -> None:
    found = [nth_time(looks) for looks in (1, 2, 3, 4, 11, 21, 22, 112)]
    names = ("first", "second", "third", "4th", "11th", "21st", "22nd", "112th")
    assert found == [f"for the {name} time" for name in names]


def test_old_lines_count_one_each() -> None:
    assert count_looks([]) == 0
    assert count_looks([{"stage": "joint"}, {"stage": "test"}, {"stage": "edit"}, {"stage": "test"}]) == 2
    assert count_looks([{"stage": "test"}, {"stage": "test", "looks": 5}]) == 5


def test_a_run_inherits_the_looks_of_what_it_was_made_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_tiny_run(tmp_path)

    def looks(name: str) -> int:
        found = layout.read_metrics(tmp_path / name)[-1]["looks"]
        assert isinstance(found, int)
        return found

    assert looks("run") == 1
    assert "time" not in (run / "report.html").read_text().partition("test images classified")[2][:60]
    editor = open_editor(run, device="cpu")
    editor.ban([0])
    assert editor.save(tmp_path / "once")["test"]["looks"] == looks("once") == 2
    editor.undo()
    editor.ban([1])
    editor.save(tmp_path / "again")
    assert looks("again") == 3, "who saves again has seen what came of the first"
    capsys.readouterr()
    assert main(["prune", str(tmp_path / "again"), "--out", str(tmp_path / "pruned"), "--keep-one"]) == 0
    assert "judged for the 4th time" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert looks("pruned") == 4
    assert "judged for the 4th time" in (tmp_path / "pruned" / "report.html").read_text()


def test_who_corrects_sees_no_test_pictures(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    likethat("atlas", run, "--device", "cpu", "--k", 3)
    text = (run / "atlas" / "atlas.json").read_text()
    for entry in json.loads(text)["prototypes"]:
        parts = {Path(found["path"]).parts[0] for part in ("train", "val") for found in entry[part]}
        assert parts == {"train", "val"}
        assert not {found["path"] for found in entry["train"]} & {found["path"] for found in entry["val"]}
    assert "test/" not in text
