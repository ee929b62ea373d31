"""One process at a time writes into a run folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.runs import DEFAULT, forked_command, likethat, make_tiny_birds

from likethat.errors import UserError
from likethat.runs.atomic_files import whole_folder
from likethat.runs.lock import check_free, lock_run

HOLD = "import sys; from pathlib import Path; from likethat.runs.lock import lock_run\n"
HOLD += "with lock_run(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def hold(out: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_training_names_the_first_and_touches_nothing(tmp_path: Path) -> None:
    birds, out = make_tiny_birds(tmp_path / "birds"), tmp_path / "deep" / "run"
    with hold(out) as holder:
        for more in ([], ["--overwrite"], ["--resume"]):
            told = likethat("train", birds, "--out", out, *DEFAULT, *more, check=2).stderr
            assert f"is being written by process {holder.pid}" in told.splitlines()[-1]
        assert sorted(path.name for path in out.iterdir()) == [".lock"]
        told = likethat("baseline", birds, "--out", out, *DEFAULT[:-2], check=2).stderr
        assert f"process {holder.pid}" in told
        holder.communicate("")
    assert not out.parent.exists(), "what the lock made and nobody filled is gone"


def test_a_lock_goes_with_its_process_however_that_ends(tmp_path: Path) -> None:
    holder = hold(tmp_path / "run")
    with pytest.raises(UserError, match=f"process {holder.pid}"), lock_run(tmp_path / "run"):
        pass
    with pytest.raises(UserError, match=f"process {holder.pid}"):
        check_free(tmp_path / "run")
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert (tmp_path / "run" / ".lock").is_file(), "nobody removed it"
    check_free(tmp_path / "run")
    with lock_run(tmp_path / "run"):
        assert str(os.getpid()) in (tmp_path / "run" / ".lock").read_text()
    assert list((tmp_path / "run").iterdir()) == [], "it was there before, so it stays"


def test_two_trainings_at_once_leave_one_whole_run(tmp_path: Path) -> None:
    birds, out = make_tiny_birds(tmp_path / "birds"), tmp_path / "run"
    arguments = ["train", str(birds), "--out", str(out), *DEFAULT]
    files = [tmp_path / "one", tmp_path / "two"]
    both = [forked_command(arguments, [f"{file}.stdout", str(file)], None) for file in files]
    for process in both:
        process.join()
    codes, told = [process.exitcode for process in both], [file.read_text() for file in files]
    assert sorted(codes) == [0, 2], told
    assert "is being written by process" in told[codes.index(2)] or "is not empty" in told[codes.index(2)]
    likethat("verify", out, "--device", "cpu")
    assert not (out / ".lock").exists()


def test_a_folder_that_another_process_finished_first_is_not_replaced(tmp_path: Path) -> None:
    def write_late() -> None:
        with whole_folder(tmp_path / "out", lambda _: True, overwrite=False) as target:
            (target / "a").write_text("second")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "a").write_text("first")

    with pytest.raises(UserError, match="there already"):
        write_late()
    assert (tmp_path / "out" / "a").read_text() == "first"
