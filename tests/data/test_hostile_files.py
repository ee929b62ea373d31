"""Data folders with things that are no pictures: pipes, devices, link loops, impossible names, hidden classes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.explain_run import make_run
from helpers.runs import TINY
from PIL import Image

from likethat.cli.parser import main
from likethat.data.decode import ImageError, read_image
from likethat.data.files import digest_file, parse_json, read_file


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two classes of six pictures."""
    for number in range(12):
        folder = tmp_path / "data" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((64, 64), 60 + number).convert("RGB").save(folder / f"{number}.png")
    return tmp_path / "data"


def commands(*asked: list[object]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of commands, one after the other in a process with little memory that is killed
    after a while: what is tested here used to hang, or to take all memory."""
    code = """
import contextlib, io, json, resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (3_000_000_000, 3_000_000_000))
from likethat.cli.parser import main
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""
    lines = json.dumps([[str(word) for word in arguments] for arguments in asked])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, lines]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def make_odd(folder: Path) -> dict[str, str]:
    """What is no picture, and what is said of it."""
    os.mkfifo(folder / "pipe.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "self.png").symlink_to("self.png")
    with (folder / "vast.png").open("wb") as file:
        file.truncate(2**40)  # of zeros, without taking room on the disk
    return {"pipe.png": "a pipe", "zero.png": "a device", "self.png": "symbolic links", "vast.png": "larger than"}


def test_what_is_no_regular_file_is_named_and_nothing_of_it_is_read(data: Path, tmp_path: Path) -> None:
    odd, run = make_odd(data / "a"), make_run(tmp_path / "made").path
    names = ("pipe.png", "zero.png", "self.png")
    checked, refused, trained, *predicted = commands(
        ["data", "check", data, "--json"],
        ["train", data, "--out", tmp_path / "refused", *TINY],
        ["train", data, "--out", tmp_path / "run", "--skip-bad", *TINY, "--baseline-epochs", 1, "--joint-epochs", 1],
        *(["predict", run, data / "a" / name, "--device", "cpu"] for name in names),
    )
    assert checked[0] == 1
    problems = {problem["path"]: problem["text"] for problem in json.loads(checked[1])["problems"]}
    assert problems.keys() == {f"a/{name}" for name in odd}
    for name, told in odd.items():
        assert told in problems[f"a/{name}"]
    assert refused[0] == 2
    assert "4 problems" in refused[2].splitlines()[-1]
    assert not (tmp_path / "refused").exists(), "nothing is left of a run that could not begin"
    assert trained[0] == 0, trained[2]
    skipped = json.loads((tmp_path / "run" / "config.json").read_text())["data"]["skipped"]
    assert skipped == ["a/pipe.png", "a/self.png", "a/vast.png", "a/zero.png"]
    for name, (code, _, told) in zip(names, predicted, strict=True):
        assert code == 2
        assert odd[name] in told
        assert "Traceback" not in told


def test_a_picture_file_is_read_as_before(tmp_path: Path) -> None:
    Image.new("RGB", (3, 2), "red").save(tmp_path / "a.png")
    (tmp_path / "link.png").symlink_to("a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert read_file(tmp_path / "link.png") == data
    assert read_file(tmp_path / "a.png", len(data)) == data
    assert digest_file(tmp_path / "link.png") == digest_file(tmp_path / "a.png")
    with pytest.raises(OSError, match="larger"):
        read_file(tmp_path / "a.png", len(data) - 1)
    with pytest.raises(OSError, match="no file can have this name"):
        read_file(Path("a\0b"))
    with pytest.raises(ImageError, match="a folder"):
        read_image(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "{", "\xff", ""])
def test_bad_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text.encode("latin-1"))


@pytest.mark.parametrize("verb", ["train", "prune", "edit"])
def test_impossible_names_get_a_sentence(
    data: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    source = data if verb == "train" else make_run(tmp_path / "made").path
    more = {"train": TINY, "prune": [], "edit": ["--ban", 0]}[verb]
    for out in (tmp_path / "file" / "run", tmp_path / ("x" * 300), tmp_path / "file" / "deep" / "run"):
        assert main([*map(str, (verb, source, "--out", out, *more))]) == 2
        told = capsys.readouterr().err
        assert told.splitlines()[-1].startswith("likethat: ")
        assert str(out)[:40] in told.splitlines()[-1]
    assert main(["info", str(tmp_path / ("y" * 300))]) == 2
    assert "too long" in capsys.readouterr().err


def test_a_hidden_class_and_unused_files_are_told_of(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data / "..c").mkdir()
    (data / ".one").mkdir()
    Image.new("RGB", (9, 9)).save(data / ".one" / "a.png")
    for number in range(3):
        Image.new("RGB", (9, 9), (number, 0, 0)).save(data / "..c" / f"{number}.png")
    Image.new("RGB", (9, 9)).save(data / "loose.jpg")
    for name in ("a/x.PSD", "a/y.psd", "b/z.CR2", "labels.csv", "a/.DS_Store", "a/Thumbs.db"):
        (data / name).write_bytes(b"something")
    assert main(["data", "check", str(data), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["classes"] == ["a", "b"]
    notes = {problem["path"]: problem for problem in document["problems"]}
    assert all(note["warning"] and note["kind"] == "left out" for note in notes.values())
    told = {path: note["text"].partition(" left out")[0] for path, note in notes.items()}
    assert told == {
        "..c": "hidden by the dot in its name, so 3 pictures in it are",
        ".one": "hidden by the dot in its name, so 1 picture in it is",
        "loose.jpg": "1 picture outside class folders",
        "a/x.PSD": "2 files ending in .psd",
        "b/z.CR2": "1 file ending in .cr2",
        "labels.csv": "1 file ending in .csv",
    }
