"""A run that is killed on a GPU, in any stage, goes on and ends as an uninterrupted one does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.gpu import (
    DEFAULT_ON_GPU,
    ON_GPU,
    PAPER_ON_GPU,
    RESNET18_ON_GPU,
    check_same_end,
    make_birds_for_gpu,
)
from helpers.interrupted import signalled
from helpers.runs import likethat

pytestmark = ON_GPU

RECIPES = {"default": DEFAULT_ON_GPU, "paper": PAPER_ON_GPU, "resnet18": RESNET18_ON_GPU}
# Recipe, stage, which of its steps or calls, seconds between saves. The fourth step of a stage is the first that is
# replayed. Joint training of the second cycle is captured anew.
CASES = [
    ("default", "baseline", 2, 1000),  # before anything was saved
    ("default", "baseline", 7, 0),
    ("default", "choose", 1, 1000),
    ("default", "joint", 8, 0),
    ("default", "joint", 12, 0),
    ("default", "project", 2, 1000),
    ("default", "last_layer", 1, 1000),
    ("default", "save", 9, 0),  # while the state is being written
    ("default", "report", 1, 1000),
    ("paper", "warm", 6, 0),
    ("paper", "joint", 14, 0),
    ("paper", "project", 1, 1000),
    ("paper", "last_layer", 2, 1000),
    ("paper", "report", 1, 1000),
    ("resnet18", "baseline", 4, 0),
    ("resnet18", "joint", 7, 0),
]
AT_A_TIME = 6  # processes, which mostly wait for themselves


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_birds_for_gpu(tmp_path_factory.mktemp("birds") / "data")


def at_a_time(function: Callable[..., object], arguments: Iterable[tuple[object, ...]]) -> None:
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for started in [pool.submit(function, *row) for row in arguments]:
            started.result()


@pytest.fixture(scope="module")
def finished(birds: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Two uninterrupted runs of each recipe."""
    folder = tmp_path_factory.mktemp("finished")
    found = {name: (folder / name, folder / f"{name}-again") for name in RECIPES}
    runs = [(name, run) for name, both in found.items() for run in both]
    at_a_time(lambda name, run: likethat("train", birds, "--out", run, *RECIPES[name]), runs)
    return found


@pytest.fixture(scope="module")
def resumed(birds: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Of each case the run that was killed and went on."""
    folder = tmp_path_factory.mktemp("resumed")
    found = {number: folder / str(number) for number in range(len(CASES))}

    def kill_and_resume(number: int) -> None:
        recipe, stage, count, save_every = CASES[number]
        train = ["train", str(birds), "--out", str(found[number]), *RECIPES[recipe]]
        killed = signalled(train, stage, count, save_every)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        likethat(*train, "--resume")

    at_a_time(kill_and_resume, ((number,) for number in found))
    return found


@pytest.mark.parametrize("number", range(len(CASES)), ids=["-".join(map(str, case[:3])) for case in CASES])
def test_killed_anywhere_it_ends_the_same(
    finished: dict[str, tuple[Path, Path]], resumed: dict[int, Path], number: int
) -> None:
    """To the bit, wherever two uninterrupted runs are the same to the bit."""
    check_same_end(resumed[number], *finished[CASES[number][0]])
