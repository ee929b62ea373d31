"""Two processes do what one does: the same projection and evaluation to the bit, the same training up to rounding."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import distributed_case
from helpers.interrupted import signalled
from helpers.runs import TINY, in_processes, likethat
from torch.distributed import TCPStore

from likethat.cli.parser import main
from likethat.data.cache import decode_samples, load_dataset
from likethat.data.formats import open_dataset
from likethat.data.synthetic.field_guide import make_birds
from likethat.runs.atomic_files import load_tensors, save_tensors

OPTIONS = [*TINY, *"--batch-size 9 --baseline-epochs 2 --joint-epochs 1,1".split()]

LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

# Ends the second process by SIGKILL in a stage, every step having been saved.
KILLER = """
import os, signal, sys
from likethat.training import loop, state
stage, count = sys.argv[1], int(sys.argv[2])
state.SAVE_EVERY = 0.0
batch_costs, calls = loop.batch_costs, 0
def deadly(run_state, its_stage, *rest):
    global calls
    calls += its_stage == stage
    if calls == count and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return batch_costs(run_state, its_stage, *rest)
loop.batch_costs = deadly
from likethat.cli.parser import main
sys.exit(main(sys.argv[3:]))
"""

# Reads images into one file; the second process ends by SIGKILL after so many of its share, or all go on to the end.
READER = """
import hashlib, json, os, signal, sys
from pathlib import Path
from likethat import distributed
from likethat.data import cache
from likethat.data.formats import open_dataset
from likethat.data.reading import workers
from likethat.runtime import stop_on_signals
workers.MANY, workers.TOGETHER, workers.UNDER_WAY = 1, 1, 2  # each process has others read for it
folder, last = Path(sys.argv[2]), int(sys.argv[3])
cache.WRITE_DOWN, told = 2, []
def progress(done, total):
    told.append(done)
    if len(told) == last and distributed.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
with stop_on_signals(), distributed.session():  # torchrun tells the others by a signal
    dataset = open_dataset(sys.argv[1])
    arguments = (dataset.root, dataset.all_samples(), (16, 12))
    found = cache.decode_samples(*arguments, workers=1, cache_file=folder / "pixels.npy", progress=progress)
    good = cache.load_dataset(dataset, (8, 8), skip_bad=True, cache_file=folder / "good.npy").pixels
    digest = lambda pixels: hashlib.sha256(pixels.tobytes()).hexdigest()
    problems = [str(problem) for problem in found.problems]
    result = [digest(found.pixels), found.sha256, problems, *map(digest, good.values())]
    (folder / f"{distributed.rank()}.json").write_text(json.dumps([len(told), result]))
"""


def torchrun(*arguments: object, check: bool = True, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Two processes on this machine; `check` says whether they must succeed, or must not."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as logs:
        launcher = [*LAUNCHER, "--max-restarts", str(restarts), "--log-dir", logs]
        done = subprocess.run([*launcher, *map(str, arguments)], capture_output=True, text=True, env=environment)
    assert (done.returncode == 0) == check, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def in_two(work: Callable[[], int]) -> list[str]:
    """Do the work in two processes that are told what torchrun tells its own; give what each says.

    They are forked off one that has loaded torch. Where torchrun itself has a part in it, it is there."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    told |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    each = [{name: str(value) for name, value in {**told, "RANK": n, "LOCAL_RANK": n}.items()} for n in range(2)]
    done = in_processes(work, *each)
    for process in done:
        assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    return [process.stdout for process in done]


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough pictures that both processes get some of the training and test images, and one all for validation."""
    folder = tmp_path_factory.mktemp("birds") / "data"
    make_birds(folder, species=3, train=30, val=3, test=25, size=64, seed=0)
    return folder


@pytest.fixture(scope="module")
def run(birds: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process ends with."""
    folder = tmp_path_factory.mktemp("one") / "run"
    likethat("train", birds, "--out", folder, *OPTIONS)
    return folder


@pytest.fixture(scope="module")
def together(run: Path, birds: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have evaluated the run, drawn its atlas and predicted: with what they said and made."""
    folder, made = tmp_path_factory.mktemp("together"), tmp_path_factory.mktemp("made")
    commands = {
        "evaluate": ["evaluate", str(run), "--json"],
        "atlas": ["atlas", str(run), "--out", str(made / "atlas")],
        "predict": ["predict", str(run), str(birds), "--out", str(made / "answers.csv")],
    }
    for name, words in commands.items():
        for number, said in enumerate(in_two(partial(main, [*words, "--device", "cpu"]))):
            (folder / f"{name}{number}").write_text(said)
    assert sorted(path.name for path in made.iterdir()) == ["answers.csv", "atlas"]
    for path in made.iterdir():
        path.rename(folder / path.name)
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], ...]:
    """Of one process and of two, what distributed_case computes."""
    folder, threads = tmp_path_factory.mktemp("case"), torch.get_num_threads()
    torch.set_num_threads(1)  # as each of the two has
    save_tensors(folder / "one.safetensors", distributed_case.work(folder / "one.scores"))
    torch.set_num_threads(threads)
    in_two(partial(distributed_case.save, folder / "two.safetensors"))
    return tuple(load_tensors(folder / f"{name}.safetensors")[0] for name in ("one", "two"))


def test_passes_over_images_have_the_same_bits(results: tuple[dict[str, torch.Tensor], ...]) -> None:
    one, two = results
    exact = [name for name in one if name.startswith("exact/")]
    assert len(exact) > 10
    for name in exact:
        assert torch.equal(one[name], two[name]), name
    assert len(one["exact/projection/image_P"].unique()) > 3
    assert bool((one["exact/nearest/image_Pk"] >= 70).any()), "the second process found none of the nearest"
    nearest_Pk = one["exact/nearest/distance_Pk"]
    assert bool((nearest_Pk[:, 0] == nearest_Pk[:, 1]).all()), "no ties, so nothing is known about them"


@pytest.mark.parametrize(("stage", "tolerance"), [("baseline", 1e-6), ("warm", 1e-4), ("joint", 1e-4)])
def test_steps_are_those_of_the_whole_batch(
    results: tuple[dict[str, torch.Tensor], ...], stage: str, tolerance: float
) -> None:
    """Uneven slices, a piece of another picture in each, BatchNorm that learns (in the baseline stage)."""
    one, two = results
    names = [name for name in one if name.startswith(f"{stage}/")]
    assert names == [name for name in two if name.startswith(f"{stage}/")]
    for name in names:
        largest = float(one[name].abs().max())
        assert float((one[name] - two[name]).abs().max()) <= tolerance * largest, name
    costs = [float(one[f"{stage}/loss{number}"]) for number in range(6)]
    assert len(set(costs)) == 6
    assert all(map(math.isfinite, costs))


def test_evaluate_and_atlas_answer_to_the_bit(run: Path, together: Path, tmp_path: Path) -> None:
    alone = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])  # what the run ended with
    assert {"stage": "test", "looks": 1, **json.loads((together / "evaluate0").read_text())} == alone
    assert (together / "evaluate1").read_text() == ""
    likethat("atlas", run, "--device", "cpu", "--out", tmp_path / "one")
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len(files) > 10
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (together / "atlas" / file).read_bytes(), file


def test_two_processes_answer_into_one_file(run: Path, birds: Path, together: Path, tmp_path: Path) -> None:
    likethat("predict", run, birds, "--device", "cpu", "--out", tmp_path / "one.csv")
    assert (tmp_path / "one.csv").read_bytes() == (together / "answers.csv").read_bytes()


def test_a_lost_process_is_told_and_any_number_goes_on(run: Path, birds: Path, tmp_path: Path) -> None:
    """One process is killed in the baseline stage, two go on, one of these is killed in the joint stage, torchrun
    starts both again, one is killed again, and one process goes on to the end."""
    out, killer = tmp_path / "run", tmp_path / "killer.py"
    killer.write_text(KILLER)
    train = ["train", str(birds), "--out", str(out), *OPTIONS]
    killed = signalled(train, "baseline", 14, save_every=0)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    lost = torchrun(killer, "joint", "4", *train, "--resume", check=False, restarts=1)
    assert lost.stderr.count("likethat (process 0): Another process of this run was lost") == 2, lost.stderr
    assert lost.stderr.count("go on with --resume") == 2
    assert re.search(r"rank +: 1 ", lost.stderr), "torchrun says which"
    _, reached = load_tensors(out / "checkpoints" / "state.safetensors")
    assert reached["batch"] == 6, "three steps in each of torchrun's starts"
    assert "joint epoch 1" not in lost.stderr
    assert lost.stderr.count("baseline epoch 2") == 1, "both processes tell"
    likethat(*train, "--resume")
    expected, found = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (run, out)
    )
    assert [record["stage"] for record in found] == [record["stage"] for record in expected]
    for before, after in zip(expected[:4], found[:4], strict=True):  # later Adam has blown up the rounding
        for part in before.keys() & {"train", "val"}:
            assert after[part] == pytest.approx(before[part], rel=1e-3)
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]


def test_asked_to_stop_all_stop_at_one_place(birds: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    endless = ["--baseline-epochs", "100000"]  # so that it cannot be over before the signal comes
    train = ["-m", "likethat", "train", str(birds), "--out", str(out), *OPTIONS, *endless]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*LAUNCHER, "--log-dir", str(tmp_path), *train]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("baseline epoch 1"):
            break
    process.send_signal(signal.SIGTERM)
    message = process.stderr.read()
    process.wait(60)
    assert "likethat (process 0): stopped; go on with: " in message
    assert "lost" not in message
    _, reached = load_tensors(out / "checkpoints" / "state.safetensors")
    assert reached["position"] >= 1
    assert not (out / "report.html").exists()


def test_processes_fill_one_file_with_pixels_and_go_on_after_a_kill(birds: Path, tmp_path: Path) -> None:
    """Of 174 pictures each process reads 87; the second is killed at its 30th."""
    data, folder, reader = tmp_path / "data", tmp_path / "cache", tmp_path / "reader.py"
    shutil.copytree(birds, data)
    reader.write_text(READER)
    broken = sorted((data / "train").rglob("*.jpg"))[40]
    broken.write_bytes(broken.read_bytes()[:200])
    lost = torchrun(reader, data, folder, 30, check=False)
    assert "Another process of this run was lost" in lost.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["pixels.npy", "pixels.npy.rows", "pixels.npy.rows1"]
    torchrun(reader, data, folder, 0)
    (first, one), (second, two) = (json.loads((folder / f"{number}.json").read_text()) for number in (0, 1))
    assert 57 <= first + second <= 60, "what was read before the kill is read again"
    assert abs(first - second) <= 1
    assert one == two
    dataset = open_dataset(data)
    expected = decode_samples(dataset.root, dataset.all_samples(), (16, 12))
    good = load_dataset(dataset, (8, 8), skip_bad=True).pixels
    assert one == [
        hashlib.sha256(expected.pixels.tobytes()).hexdigest(),
        expected.sha256,
        [str(problem) for problem in expected.problems],
        *(hashlib.sha256(pixels.tobytes()).hexdigest() for pixels in good.values()),
    ]
    assert sum(map(len, good.values())) == 173
    told: list[int] = []
    picture = next((data / "val").rglob("*.jpg"))
    picture.write_bytes(next((data / "test").rglob("*.jpg")).read_bytes())
    again = decode_samples(
        dataset.root,
        dataset.all_samples(),
        (16, 12),
        cache_file=folder / "pixels.npy",
        progress=lambda done, _: told.append(done),
    )
    assert told == [174], "one process knows what two have read, and reads the changed file"
    assert np.array_equal(again.pixels, decode_samples(dataset.root, dataset.all_samples(), (16, 12)).pixels)
    assert not (folder / "pixels.npy.rows1").exists()


@pytest.mark.parametrize("question", [["info"], ["evaluate", "--interpretability"]])
def test_what_needs_one_process_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: list[str]) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():  # as torchrun sets them
        monkeypatch.setenv(name, value)
    refused = likethat(*question, tmp_path, check=2)
    assert refused.stderr.startswith("likethat (process 1): Only train, baseline, evaluate, predict and atlas")
    assert refused.stdout == ""
