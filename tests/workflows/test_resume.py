"""A run that is killed, stopped or starved goes on and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from helpers.interrupted import contents, limit_files, signalled
from helpers.runs import DEFAULT, PAPER, likethat, make_tiny_run
from torch import nn

from likethat import __version__
from likethat.config.presets import resolve
from likethat.data import cache
from likethat.data.journal import journal_of
from likethat.data.reading import workers
from likethat.errors import Interrupted
from likethat.progress import Display
from likethat.runs import layout
from likethat.runs.atomic_files import load_optimizer_tensors, load_tensors, optimizer_tensors, save_tensors
from likethat.runtime import StopFlag
from likethat.workflows import run_setup


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the default options that other files take for granted."""
    return make_tiny_run(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def birds(tiny_run: Path) -> Path:
    return tiny_run.parent / "birds"


@pytest.fixture(scope="module")
def recipes(birds: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Options of runs: both presets, a width that the run chooses, a baseline that is given."""
    baseline = tmp_path_factory.mktemp("baseline") / "run"
    likethat("baseline", birds, "--out", baseline, *DEFAULT)
    auto = [*DEFAULT, "--backbone", "test_efficientnet", "--latent-width", "auto"]
    given = [*DEFAULT, "--from-baseline", str(baseline)]
    return {"default": DEFAULT, "paper": PAPER, "auto": auto, "given": given}


@pytest.fixture(scope="module")
def finished(
    tiny_run: Path, birds: Path, recipes: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    """What uninterrupted runs end as."""
    folder = tmp_path_factory.mktemp("finished")
    runs = {name: tiny_run if name == "default" else folder / name for name in recipes}
    for name, run in runs.items():
        if run != tiny_run:
            likethat("train", birds, "--out", run, *recipes[name])
    return {name: contents(run) for name, run in runs.items()}


def test_same_seed_same_bits_other_seed_other_bits(
    birds: Path, tmp_path: Path, finished: dict[str, dict[str, str]]
) -> None:
    likethat("train", birds, "--out", tmp_path / "again", *DEFAULT)
    assert contents(tmp_path / "again") == finished["default"]
    likethat("train", birds, "--out", tmp_path / "other", *DEFAULT, "--seed", "1")
    assert contents(tmp_path / "other")["model.safetensors"] != finished["default"]["model.safetensors"]


@pytest.mark.parametrize(
    ("recipe", "places"),
    [
        (
            "default",
            [
                ("baseline", 2, 1000),  # before anything was saved
                ("baseline", 4, 0),  # in the second epoch, saved after every batch
                ("save", 3, 0),  # while the state is being written
                ("choose", 1, 1000),
                ("joint", 5, 0),
                ("last_layer", 1, 1000),
                ("project", 1, 1000),  # the second cycle
                ("report", 1, 1000),
            ],
        ),
        (
            "paper",
            [
                ("warm", 3, 0),
                ("project", 1, 1000),
                ("joint", 1, 1000),  # the second cycle
                ("last_layer", 1, 1000),
            ],
        ),
        ("auto", [("joint", 2, 1000), ("report", 1, 1000)]),  # the width is saved, and in the configuration too
        ("given", [("choose", 1, 1000)]),  # before anything was saved
    ],
)
def test_killed_anywhere_it_ends_the_same(
    birds: Path,
    tmp_path: Path,
    recipes: dict[str, list[str]],
    finished: dict[str, dict[str, str]],
    recipe: str,
    places: list[tuple[str, int, float]],
) -> None:
    """One run is killed at each of the places in turn: what one resumption got wrong would be wrong at the end."""
    run = tmp_path / "run"
    train = ["train", str(birds), "--out", str(run), *recipes[recipe]]
    for number, (stage, count, save_every) in enumerate(places):
        killed = signalled([*train, "--resume"] if number else train, stage, count, save_every)
        assert killed.returncode == -signal.SIGKILL, f"{stage}: {killed.stderr}"
    likethat(*train, "--resume")
    assert contents(run) == finished[recipe]
    assert not (run / "checkpoints").exists(), "half files are gone as well"


def test_stages_too_short_to_be_saved_are_done_again(
    birds: Path, tmp_path: Path, finished: dict[str, dict[str, str]]
) -> None:
    run = tmp_path / "run"
    train = ["train", str(birds), "--out", str(run), *DEFAULT]
    killed = signalled(train, "report", 1, worth_saving=1000)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    _, document = load_tensors(run / layout.STATE)
    assert document["position"] == 1, "the first stage alone is saved, so that the run is never taken for finished"
    likethat(*train, "--resume")
    assert contents(run) == finished["default"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_names_the_command_that_goes_on(
    birds: Path, tmp_path: Path, finished: dict[str, dict[str, str]], number: int
) -> None:
    run = tmp_path / "run"
    train = ["train", str(birds), "--out", str(run), *DEFAULT]
    stopped = signalled(train, "baseline", 5, number=number)
    message = stopped.stderr
    assert stopped.returncode == 130
    assert "baseline epoch 1" in message
    assert "baseline epoch 2" not in message
    assert f"likethat train {birds} --out {run}" in message
    assert message.strip().endswith("--resume")
    assert "Traceback" not in message
    assert (run / "checkpoints" / "state.safetensors").is_file()
    (run / "README.md").write_text("a note of the user's, no sign that the run is finished")
    likethat(*train, "--resume")
    assert contents(run) == finished["default"]


@pytest.mark.parametrize("many", [workers.MANY, 1])
def test_asked_to_stop_while_it_reads_it_keeps_what_it_has_read(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    monkeypatch.setattr(workers, "MANY", many)
    monkeypatch.setattr(run_setup, "MEMORY_SHARE", 0.0)  # pixels go to a file
    stop = StopFlag()
    stop.request()
    with pytest.raises(Interrupted):
        run_setup.prepare(birds, tmp_path, resolve(), torch.device("cpu"), Display(quiet=True), stop)
    header, *rows = filter(None, journal_of(tmp_path / layout.PIXELS).read_text().splitlines())
    assert "shape" in header
    assert [json.loads(row)[0] for row in rows] == [0]


def readers_die() -> None:
    """In the command's own process: from one picture on, other processes read, and they are killed."""
    workers.MANY = 1
    cache.examine = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_a_killed_reader_of_images_is_told(birds: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = likethat("train", birds, "--out", run, *DEFAULT, check=2, before=readers_die)
    assert "A process that reads pictures was killed" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (run / layout.CONFIG).exists()


def test_resuming_with_other_settings_or_images_is_refused(birds: Path, tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(birds, data)
    killed = signalled(["train", str(data), "--out", str(run), *DEFAULT], "joint", 1)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    refused = likethat("train", data, "--out", run, *DEFAULT, "--batch-size", "9", "--resume", check=2)
    assert "--batch-size" in refused.stderr
    next((data / "train").rglob("*.jpg")).unlink()
    refused = likethat("train", data, "--out", run, *DEFAULT, "--resume", check=2)
    assert "not those" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that a refused command says."""
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("likethat: ")
    return last


@pytest.fixture(scope="module")
def stopped(birds: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its second stage of gradient descent."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    killed = signalled(["train", str(birds), "--out", str(run), *DEFAULT], "joint", 2, save_every=0)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    return run


def test_a_bad_state_is_refused_in_a_sentence_with_the_way_out(birds: Path, stopped: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    train = ["train", str(birds), "--out", str(run), *DEFAULT]
    state = run / layout.STATE
    whole = state.read_bytes()
    tensors, document = load_tensors(state)

    def refused(words: str) -> None:
        said = one_sentence(likethat(*train, "--resume", check=2))
        assert words in said
        assert "--overwrite" in said

    for size in (0, 100, len(whole) - 1):
        state.write_bytes(whole[:size])
        refused("is damaged")
    for written in ({**document, "format": document["format"] + 1}, {"position": 0}, None, [1]):
        save_tensors(state, tensors, written)
        refused("another version of likethat")
    save_tensors(state, tensors, {**document, "format": 99, "versions": {"likethat": "9.9", "torch": "3.0"}})
    refused("(likethat 9.9, torch 3.0)")
    save_tensors(state, tensors, {**document, "images": "others"})
    refused("another run")
    settings = {**document["config"], "train": {**document["config"]["train"], "seed": 5}}
    save_tensors(state, tensors, {**document, "config": settings})
    refused("another run")
    fewer = {name: value for name, value in tensors.items() if not name.startswith("model/backbone")}
    save_tensors(state, fewer, {**document, "versions": {"timm": "1.0.1"}})
    refused("it was saved with timm 1.0.1")
    save_tensors(state, tensors, {name: value for name, value in document.items() if name != "position"})
    refused("does not fit")


def test_a_state_of_other_libraries_or_of_another_device_goes_on_with_a_note(
    birds: Path, stopped: Path, finished: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    tensors, document = load_tensors(run / layout.STATE)
    assert document["versions"] == {"likethat": __version__, "torch": torch.__version__, "timm": timm.__version__}
    assert document["device"] == "cpu"
    note = "note: the run was saved with torch 2.8.0{} and goes on with likethat"
    for device, words in (("cpu", ""), ("cuda", " on cuda")):
        save_tensors(run / layout.STATE, tensors, {**document, "versions": {"torch": "2.8.0"}, "device": device})
        done = signalled(["train", str(birds), "--out", str(run), *DEFAULT, "--resume"], "joint", 1)
        assert done.stderr.count(note.format(words)) == 1
        assert done.stderr.count("on cpu: it may not end the same") == (device == "cuda")
    likethat("train", birds, "--out", run, *DEFAULT, "--resume")
    assert contents(run) == finished["default"]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_what_an_optimiser_remembers_lies_in_memory_as_its_parameters_do(kind: type[torch.optim.Adam]) -> None:
    """Fused Adam on CUDA refuses anything else; files hold no memory layout."""
    layers = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)) for _ in range(2)]
    trained, resumed = (layer.to(memory_format=torch.channels_last) for layer in layers)  # type: ignore[call-overload]
    before, after = kind(trained.parameters()), kind(resumed.parameters())
    trained(torch.rand(2, 3, 8, 8)).square().mean().backward()
    before.step()
    tensors = {name: value.contiguous() for name, value in optimizer_tensors(before).items()}
    load_optimizer_tensors(after, tensors)
    assert len(after.state) == 4
    assert not trained[0].weight.is_contiguous()
    for old, new in zip(trained.parameters(), resumed.parameters(), strict=True):
        assert after.state[new]["step"] == 1
        for quantity in ("exp_avg", "exp_avg_sq"):
            assert after.state[new][quantity].stride() == new.stride() == before.state[old][quantity].stride()
            assert torch.equal(after.state[new][quantity], before.state[old][quantity])


def test_a_resumed_run_tells_which_classifier_it_began_with(
    birds: Path, recipes: dict[str, list[str]], finished: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    command = ["train", str(birds), "--out", str(tmp_path / "run"), *recipes["given"]]
    signalled(command, "project", 1)
    likethat(*command[:-1], tmp_path / "gone", "--resume")  # which it has read by then
    assert contents(tmp_path / "run") == finished["given"]


def test_a_full_disk_stops_with_a_sentence_and_keeps_the_last_state(
    birds: Path, finished: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """A file size limit stands for the full disk: the next state no longer fits."""
    run = tmp_path / "run"
    signalled(["train", str(birds), "--out", str(run), *DEFAULT], "choose", 1)
    state = run / "checkpoints" / "state.safetensors"
    saved = state.read_bytes()
    state.with_name(f".{state.name}.ab3_x9qz").write_bytes(saved[:1000])  # as the killed process may have left it
    done = likethat("train", birds, "--out", run, *DEFAULT, "--resume", check=2, before=partial(limit_files, 200_000))
    assert "could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert state.read_bytes() == saved
    assert not [file for file in (run / "checkpoints").iterdir() if file.name.startswith(".")], "no half file is left"
    likethat("train", birds, "--out", run, *DEFAULT, "--resume")
    assert contents(run) == finished["default"]


def test_a_loss_that_is_not_finite_stops_with_advice(birds: Path, tmp_path: Path) -> None:
    done = likethat("train", birds, "--out", tmp_path / "run", *DEFAULT, "--baseline-lr", "1e30", check=2)
    assert "not finite" in done.stderr
    assert "learning rates" in done.stderr
    assert "Traceback" not in done.stderr
