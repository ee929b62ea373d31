"""`likethat predict --out`: every row as `explain` tells it, in every format, and the same bytes after any kill."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.explain_run import make_run
from helpers.runs import QUICK, likethat, make_tiny_birds, make_tiny_run
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from likethat.data.reading import workers
from likethat.explaining.explanation import explain
from likethat.runs.classifier import load
from likethat.workflows.predict import reading
from likethat.workflows.predict import run as run_module
from likethat.workflows.predict.formats import COLUMNS
from likethat.workflows.predict.frames import FrameWriter, find_frames, frame_files, next_start


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_birds(tmp_path_factory.mktemp("predict") / "birds")
    (folder / "test" / "torn.jpg").write_bytes(next((folder / "test").rglob("*.jpg")).read_bytes()[:300])
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("trained"), QUICK)


@pytest.fixture(scope="module")
def answers(run: Path, birds: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    likethat("predict", run, birds, "--out", out, "--device", "cpu", before=in_batches_of_five)
    return out


def in_batches_of_five(many: int = 10**6) -> None:
    """In the command's own process; from `many` pictures on, other processes read them."""
    run_module.BATCH, workers.MANY = 5, many


def killed_at(count: int, many: int = 10**6) -> None:
    """In the command's own process: kill it when it has half of a batch's answers written."""
    in_batches_of_five(many)
    whole, calls = FrameWriter.add, 0

    def add(self: FrameWriter, batch: int, answers: bytes, unread: int) -> None:
        nonlocal calls
        calls += 1
        if calls == count:
            self.file.write(f"{batch} {unread} {len(answers)} 123\n".encode() + answers[: len(answers) // 2])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        whole(self, batch, answers, unread)

    FrameWriter.add = add  # type: ignore[method-assign]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_row(row: dict[str, Any], explanation: Any) -> None:
    best = explanation.predicted
    assert row["class"] == best.name
    assert row["probability"] == pytest.approx(best.probability, abs=1e-5)
    rows = sorted((entry for entry in best.rows if entry.points > 0), key=lambda entry: -entry.points)[:3]
    assert len(row["reasons"]) == len(rows)
    for reason, entry in zip(row["reasons"], rows, strict=True):
        prototype = entry.match.prototype
        assert reason["points"] == pytest.approx(entry.points, abs=1e-3)
        assert reason["similarity"] == pytest.approx(entry.match.similarity, abs=1e-3)
        assert (reason["prototype"], reason["source"]) == (prototype.id, prototype.path)
        assert reason["class"] == prototype.class_name
        assert reason["box"] == pytest.approx(entry.match.box, abs=0.06)


def test_rows_say_what_explanations_say(run: Path, birds: Path, answers: Path) -> None:
    classifier, rows = load(run, "cpu"), lines_of(answers)
    assert [row["path"] for row in rows] == sorted(str(path) for path in birds.rglob("*.jpg"))
    for row in rows:
        if row["path"].endswith("torn.jpg"):
            assert "ends too early" in row["error"]
            assert row["class"] is None
            continue
        explanation = explain(classifier, row["path"])
        check_row(row, explanation)
        assert explanation.verdict is not None
        assert row["level"] == explanation.verdict.level
        if "/val/" not in row["path"]:  # those stand on the very thresholds, where rounding decides
            assert row["prediction_set"] == list(explanation.verdict.classes)
            assert row["abstains"] == explanation.verdict.abstains


def test_boxes_are_in_the_files_own_pixels_whichever_way_up_they_lie(tmp_path: Path) -> None:
    tiny = make_run(tmp_path)  # pictures of all eight orientations
    likethat("predict", tiny.path, tiny.root, "--out", tmp_path / "a.jsonl", "--device", "cpu")
    rows, classifier = lines_of(tmp_path / "a.jsonl"), load(tiny.path, "cpu")
    assert len(rows) == len(tiny.samples) == 9
    for row in rows:
        check_row(row, explain(classifier, row["path"]))
        assert row["prediction_set"] is None, "the run is not calibrated"


def test_formats_say_the_same(run: Path, birds: Path, answers: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("a.csv", "a.parquet"):
        likethat("predict", run, birds, "--out", tmp_path / name, "--device", "cpu", before=in_batches_of_five)
    rows = lines_of(answers)
    assert parquet.read_table(tmp_path / "a.parquet").to_pylist() == [
        {**{name: row[name] for name in row if name != "reasons"}, "reasons": row["reasons"]} for row in rows
    ]
    with (tmp_path / "a.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == list(COLUMNS)
    for cells, row in zip(table, rows, strict=True):
        assert cells["path"] == row["path"]
        assert cells["class"] == (row["class"] or "")
        assert cells["prediction_set"] == "|".join(row["prediction_set"] or [])
        assert cells["abstains"] == {None: "", True: "yes", False: "no"}[row["abstains"]]
        for number in (1, 2, 3):
            reason = row["reasons"][number - 1] if len(row["reasons"]) >= number else None
            assert cells[f"reason_{number}_points"] == ("" if reason is None else str(reason["points"]))
            assert cells[f"reason_{number}_box"] == ("" if reason is None else " ".join(map(str, reason["box"])))


def test_killed_again_and_again_it_ends_in_the_same_bytes(
    run: Path, birds: Path, answers: Path, tmp_path: Path
) -> None:
    command = ["predict", run, birds, "--out", tmp_path / "answers.jsonl", "--device", "cpu"]
    for count in (3, 1, 2):
        assert likethat(*command, check=None, before=partial(killed_at, count)).returncode == -signal.SIGKILL
        assert not (tmp_path / "answers.jsonl").exists()
    done = likethat(*command, before=in_batches_of_five)
    assert "going on: 15 of 37 pictures are answered already" in done.stderr
    assert (tmp_path / "answers.jsonl").read_bytes() == answers.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]


def test_what_was_begun_is_not_mixed_with_something_else(run: Path, birds: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.csv"
    command = ["predict", run, birds, "--out", out, "--device", "cpu"]
    likethat(*command, check=None, before=partial(killed_at, 3))
    for other in ([birds, "--level", "0.8"], [birds / "test"]):
        refused = likethat("predict", run, *other, "--out", out, "--device", "cpu", check=2)
        assert "was begun with another run, other pictures or another --level" in refused.stderr
    likethat(*command, "--level", "0.8", "--overwrite")
    kept = out.read_bytes()
    assert b",0.8," in kept
    assert "is there already" in likethat(*command, check=2).stderr
    assert out.read_bytes() == kept
    likethat(*command, "--overwrite")
    assert b",0.8," not in out.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--out", "answers.xlsx"], "written as .csv, .jsonl or .parquet"),
        (["--out", "folder.csv"], "is a folder"),
        (["--overwrite"], "--overwrite replaces the file of --out"),
        (["--out", "a.csv", "--level", "2"], "level"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    run: Path, birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.csv").mkdir()
    done = likethat("predict", run, birds, *arguments, check=2)
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["folder.csv"], "nothing is left behind"


def test_a_folder_without_pictures_leaves_nothing_behind(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert (
        "no picture was found"
        in likethat("predict", run, tmp_path / "empty", "--out", tmp_path / "a.csv", check=2).stderr
    )
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_processes_that_read_change_nothing(run: Path, birds: Path, answers: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    command = ["predict", run, birds, "--out", out, "--device", "cpu"]
    killed = likethat(*command, check=None, before=partial(killed_at, 4, many=1))
    assert killed.returncode == -signal.SIGKILL
    end = time.monotonic() + 30
    while users_of(tmp_path):
        assert time.monotonic() < end, "processes that read end with the one that asked them to"
    likethat(*command, before=partial(in_batches_of_five, many=1))
    assert out.read_bytes() == answers.read_bytes()


def users_of(folder: Path) -> list[str]:
    """Return the open files in a folder, whichever processes have them."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            found.append(os.readlink(link))
    return [file for file in found if file.startswith(str(folder))]


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def readers_die() -> None:
    in_batches_of_five(many=1)
    reading.read_image = die  # type: ignore[assignment]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_a_killed_reader_is_told(run: Path, birds: Path, tmp_path: Path) -> None:
    done = likethat("predict", run, birds, "--out", tmp_path / "a.csv", "--device", "cpu", check=2, before=readers_die)
    assert "A process that reads pictures was killed" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "a.csv").exists()


def test_what_waits_is_as_small_as_what_the_network_sees(run: Path, tmp_path: Path) -> None:
    large, small = (tmp_path / name for name in ("large.png", "small.png"))
    Image.new("RGB", (3000, 2000), "red").save(large)
    Image.new("RGB", (30, 20), "red").save(small)
    pictures = [reading.NamedPicture(str(path)) for path in (large, tmp_path / "none.png", small)]
    (batch,) = reading.read_batches(load(run, "cpu"), pictures, [0], 4)
    assert [pixels.shape for pixels in batch.pixels] == [(2, 64, 64, 3)]
    assert (batch.pixels[0] == [255, 0, 0]).all()
    assert [view.upright_hw for (view,) in batch.views] == [(2000, 3000), (20, 30)]
    assert "cannot be opened" in str(batch.told[1])


@given(batches=st.lists(st.binary(max_size=40), max_size=6), cut=st.integers(0, 300))
def test_a_file_cut_anywhere_keeps_its_whole_frames(
    tmp_path_factory: pytest.TempPathFactory, batches: list[bytes], cut: int
) -> None:
    folder = tmp_path_factory.mktemp("frames")
    writer, ends = FrameWriter(folder, next_start(folder), 0), []
    for number, answers in enumerate(batches):
        writer.add(number, answers, number % 3)
        ends.append(writer.file.tell())
    writer.close()
    (file,) = frame_files(folder)
    file.write_bytes(file.read_bytes()[:cut])
    frames = find_frames([file])
    assert sorted(frames) == [number for number, end in enumerate(ends) if end <= cut]
    assert all(frames[number].read() == batches[number] for number in frames)
    assert next_start(folder) == 2
