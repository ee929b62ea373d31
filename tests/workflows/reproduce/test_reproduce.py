"""A study stopped and killed on its way: it goes on, loses nothing, and its table says what its runs say."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.forked import fork_runs
from helpers.runs import TINY, forked_command, likethat, make_tiny_birds
from safetensors.torch import save_file

from likethat import load
from likethat.config.presets import resolve
from likethat.data.formats import open_dataset
from likethat.errors import UserError
from likethat.workflows.reproduce.plan import Study, make_tasks, run_options
from likethat.workflows.reproduce.study import reproduce

BACKBONES = ("test_resnet", "test_efficientnet")
AS_LONG = "baseline-as-long-as-default"
# Those of the other tests' runs, less what a study sets itself.
OPTIONS = [*TINY[4:], *"--baseline-epochs 2 --joint-epochs 1".split()]


def arguments(birds: Path, out: Path, backbones: tuple[str, ...] = BACKBONES, seeds: int = 2) -> list[str]:
    names = ["reproduce", str(birds), "--backbones", *backbones, "--weights", "none", "--seeds", str(seeds)]
    return [*names, "--out", str(out), *OPTIONS]


def python_options() -> dict[str, Any]:
    """The same for one seed, as Python takes them."""
    own = {"latent_width": 16, "input_size": 64, "batch_size": 8, "prototypes_per_class": 3}
    return {"weights": ("none",), "seeds": 1, "device": "cpu", **own, "baseline_epochs": 2, "joint_epochs": 1}


def act_at(words: str, act: Callable[[BaseProcess], object], command: list[str]) -> tuple[int, str]:
    """Does something as soon as the command has said so; gives its exit code and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder, "stderr")
        os.mkfifo(pipe)
        process = forked_command(command, [str(Path(folder, "stdout")), str(pipe)], fork_runs)
        said = ""
        with pipe.open() as lines:
            for line in lines:
                said += line
                if words in line:
                    act(process)
        process.join()
    assert process.exitcode is not None
    return process.exitcode, said


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_birds(tmp_path_factory.mktemp("birds") / "data")


@pytest.fixture(scope="module")
def study(birds: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study") / "out"
    command = [*arguments(birds, out), "--jobs", "2"]
    code, said = act_at("seed0/test_resnet/default ...", lambda process: process.terminate(), command)
    assert code == 130
    assert "go on with: likethat reproduce" in said
    partial = json.loads((out / "table.json").read_text())
    assert not partial["complete"]
    assert "study so far: " in (out / "table.md").read_text()
    assert next(row["test"]["by_seed"].keys() for row in partial["rows"] if "test" in row) == {"0"}
    # The runs under way outlive a kill, and may be at it still when the next command begins, or have finished.
    code, _ = act_at("seed0/test_resnet/default ...", lambda process: process.kill(), command)
    assert code == -signal.SIGKILL
    alone = out / "seed0" / "test_resnet" / "default"
    while not (alone / "report.html").is_file():  # however long it takes
        time.sleep(0.1)
    done = likethat(*command, before=fork_runs)
    assert "seed0/test_resnet/baseline ..." not in done.stderr
    assert done.stdout.startswith("# Baselines and ProtoPNets on data\n")
    return out


def document(study: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((study / "table.json").read_text())
    return loaded


def row_of(study: Path, backbone: str, model: str) -> dict[str, Any]:
    rows = [row for row in document(study)["rows"] if (row["backbone"], row["model"]) == (backbone, model)]
    assert len(rows) == 1
    return rows[0]


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_stopped_study_ends_as_single_commands_do(study: Path, birds: Path, tmp_path: Path) -> None:
    """The run that was stopped and killed, against one that was not; the baseline is not trained twice."""
    own = [*OPTIONS, "--backbone", "test_resnet", "--weights", "none", "--seed", "0"]
    baseline = study / "seed0" / "test_resnet" / "baseline"
    likethat("train", birds, "--out", tmp_path / "run", *own, "--from-baseline", baseline)
    for ours, theirs in zip(
        lines_of(study / "seed0" / "test_resnet" / "default"), lines_of(tmp_path / "run"), strict=True
    ):
        ours.pop("seconds", None), theirs.pop("seconds", None)
        assert ours == theirs
    stages = [line["stage"] for line in lines_of(study / "seed0" / "test_resnet" / "default")]
    assert "baseline" not in stages


def test_every_figure_is_a_runs_own(study: Path) -> None:
    for backbone in BACKBONES:
        for seed in "01":
            folder = study / f"seed{seed}" / backbone
            baseline, ours, pruned = (lines_of(folder / name) for name in ("baseline", "default", "default-pruned"))
            row = row_of(study, backbone, "default")
            assert row_of(study, backbone, "baseline")["test"]["by_seed"][seed] == baseline[-1]["accuracy"]
            assert row_of(study, backbone, "baseline")["validation"]["by_seed"][seed] == baseline[-2]["val"]["accuracy"]
            as_long = lines_of(folder / AS_LONG)
            assert [line["stage"] for line in as_long] == ["joint", "keep", "test"], "it goes on from that baseline"
            assert row_of(study, backbone, AS_LONG)["test"]["by_seed"][seed] == as_long[-1]["accuracy"]
            assert row_of(study, backbone, AS_LONG)["validation"]["by_seed"][seed] == as_long[-2]["val"]["accuracy"]
            project, last_layer, test_projection, test = ours[-4:]
            for figure, value in {
                "validation_before_projection": project["before"]["accuracy"],
                "validation_after_projection": project["after"]["accuracy"],
                "validation_after_last_layer": last_layer["val"]["accuracy"],
                "test_before_projection": test_projection["before"]["accuracy"],
                "test_after_projection": test_projection["after"]["accuracy"],
                "test": test["accuracy"],
                "test_pruned": pruned[-1]["accuracy"],
                "prototypes": 9,
                "prototypes_pruned": pruned[-2]["prototypes"],
                "connections": last_layer["nonzero_negative"],
                "connections_pruned": pruned[-2]["nonzero_negative"],
            }.items():
                assert row[figure]["by_seed"][seed] == value, figure
            together = lines_of(study / f"seed{seed}" / "+".join(BACKBONES) / "default")[-1]["accuracy"]
            assert row_of(study, "combined", "default")["test"]["by_seed"][seed] == together


def test_projection_is_judged_with_the_prototypes_before_and_after_it(study: Path, birds: Path) -> None:
    """In a run of one cycle the connections before the last layer are all alike, so that sums of scores decide."""
    run = study / "seed0" / "test_resnet" / "default"
    classifier = load(run, "cpu")
    network, samples = classifier.networks[0], open_dataset(birds, seed=0).test
    pictures = [classifier.prepare(birds / sample.path, sample.box).pixels[0] for sample in samples]
    with torch.no_grad():
        z_NDS = network.latent(torch.stack(pictures) / 255).flatten(2)
    layer, told = network.prototype_layer, lines_of(run)[-2]
    assert not torch.equal(layer.prototype_PDhw, layer.unprojected_PDhw)
    for when, prototypes in (("before", layer.unprojected_PDhw), ("after", layer.prototype_PDhw)):
        right = 0
        for z_DS, sample in zip(z_NDS, samples, strict=True):
            points = [0.0] * len(classifier.classes)
            for prototype_D, label in zip(prototypes.detach()[:, :, 0, 0], layer.class_P.tolist(), strict=True):
                alike = torch.cosine_similarity(z_DS, prototype_D[:, None], dim=0).max()
                points[label] += max(float(alike), 0.0) * min(float(prototype_D.norm()), 1.0)
            right += points.index(max(points)) == sample.label
        assert told[when]["accuracy"] == pytest.approx(right / len(samples))


def test_means_and_deviations(study: Path) -> None:
    spread = 0
    for row in document(study)["rows"]:
        for name, figure in row.items():
            if name not in ("images", "backbone", "model"):
                values = list(figure["by_seed"].values())
                assert figure["mean"] == pytest.approx(np.mean(values))
                assert figure["sd"] == pytest.approx(np.std(values, ddof=1))
                spread += figure["sd"] > 0
    assert spread > 4, "two seeds that agree in everything put nothing to the test"


def test_markdown_and_picture_show_the_same(study: Path) -> None:
    text = (study / "table.md").read_text()
    picture = "".join(ElementTree.parse(study / "table.svg").getroot().itertext())
    models = ("baseline", AS_LONG, "default")
    for backbone, model in [(b, m) for b in BACKBONES for m in models] + [("combined", "default")]:
        figure = row_of(study, backbone, model)["test"]
        assert f" {100 * figure['mean']:.1f} ± {100 * figure['sd']:.1f} |" in text
        assert f"{100 * figure['mean']:.1f}" in picture
        assert backbone in picture
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    assert rows[2:5] == ["baseline", "baseline, as long as default", "ProtoPNet, default"]
    assert "baseline, as long as default" in picture
    assert "Not complete" not in text
    assert "so far" not in text


def test_wall_times_are_told(study: Path) -> None:
    seconds = document(study)["seconds"]
    assert len(seconds) == 1 + 2 * (2 * 4 + 1)
    assert all(value > 0 for value in seconds.values())
    assert seconds["study"] >= max(seconds.values())


def test_a_finished_study_runs_nothing(study: Path, birds: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in study.rglob("*") if path.is_file() and "table" not in path.name}
    done = likethat(*arguments(birds, study), "--json")
    assert json.loads(done.stdout)["rows"] == document(study)["rows"]
    after = {path: path.stat().st_mtime_ns for path in before}
    before.pop(study / "times.json"), after.pop(study / "times.json")
    assert after == before


def test_a_run_that_another_process_is_at_is_not_begun_a_second_time(study: Path, birds: Path, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    shutil.copytree(study, tmp_path / "moved")
    name = f"seed1/{'+'.join(BACKBONES)}/default"
    shutil.rmtree(tmp_path / "moved" / name)
    for file in ("report.html", "model.safetensors"):  # unfinished, and the baseline it began with has moved as well
        (tmp_path / "moved" / "seed0" / "test_resnet" / "default" / file).unlink()
    with (tmp_path / "moved" / f"{name}.log").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        said_before = log.tell()

        def leave(_: BaseProcess) -> None:
            assert not (tmp_path / "moved" / name).exists()
            assert log.tell() == said_before
            fcntl.flock(log, fcntl.LOCK_UN)

        code, said = act_at("waiting for the process", leave, arguments(birds, tmp_path / "moved"))
    assert code == 0
    assert said.count(f"{name} ...") == 1
    assert "seed0/test_resnet/default done" in said
    assert document(tmp_path / "moved")["rows"][-1]["test"] == document(study)["rows"][-1]["test"]


def test_a_failure_is_told_and_loses_nothing_else(study: Path, birds: Path, tmp_path: Path) -> None:
    """A moved study with one more backbone, whose weights do not fit."""
    shutil.copytree(study, tmp_path / "moved")
    save_file({"conv1.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    command = arguments(birds, tmp_path / "moved", (*BACKBONES, "test_vit"), seeds=1)
    at = command.index("none")
    command[at : at + 1] = ["none", "none", str(tmp_path / "other.safetensors")]
    done = likethat(*command, check=1, before=fork_runs)
    assert "seed0/test_vit/baseline failed: The weights" in done.stderr
    failures = document(tmp_path / "moved")["failures"]
    assert set(failures) == {
        *(f"seed0/test_vit/{name}" for name in ("baseline", AS_LONG, "default", "default-pruned")),
        f"seed0/{'+'.join(BACKBONES)}+test_vit/default",
    }
    assert "`seed0/test_vit/baseline`: The weights" in done.stdout
    kept = row_of(tmp_path / "moved", "test_resnet", "default")["test"]
    assert kept["by_seed"]["0"] == row_of(study, "test_resnet", "default")["test"]["by_seed"]["0"]
    assert kept["sd"] is None
    assert "test" not in row_of(tmp_path / "moved", "combined", "default")


def test_explanations_are_measured_on_request(study: Path, birds: Path, tmp_path: Path) -> None:
    """A study that is finished but for that, in a place of its own; the table says what the run's own file says."""
    moved = tmp_path / "moved"
    shutil.copytree(study, moved)
    command = [*arguments(birds, moved, ("test_resnet",), seeds=1), "--interpretability", "val"]
    done = likethat(*command)
    assert [line.split()[0] for line in done.stderr.splitlines() if line.endswith(" ...")] == [
        "seed0/test_resnet/default-interpretability"
    ]
    run = moved / "seed0" / "test_resnet" / "default"
    measured = json.loads((run / "interpretability-val.json").read_text())
    value_of = {figure["name"]: figure["value"] for figure in measured["figures"]}
    row = row_of(moved, "test_resnet", "default")
    assert row["consistency"]["by_seed"] == {"0": value_of["consistency"]}
    assert f"| consistency | {100 * value_of['consistency']:.1f} |" in done.stdout
    for counted in ("prototypes", "lines"):
        name = f"{counted} for nine tenths of the points"
        mean = f"{value_of[name]:.1f}".removesuffix(".0")  # of one seed: whole numbers are counts
        assert f"| {name} | {mean} |" in done.stdout
    assert "| explanations, validation images | test_resnet, ProtoPNet, default |" in done.stdout
    assert document(moved)["complete"]
    (run / "interpretability-val.json").unlink()
    told = reproduce(birds, ("test_resnet",), moved, **python_options(), interpretability="")
    assert told["complete"], "nobody asked for what is missing"
    assert "consistency" not in row_of(moved, "test_resnet", "default")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": ("none", "none", "none")}, "one entry for each of the 2 backbones"),
        ({"weights": ("none", "nowhere.pth")}, "nowhere.pth does not exist"),
        ({"backbones": ("test_resnet", "resnet_9000")}, "no timm model called 'resnet_9000'"),
        ({"backbones": ("test_resnet", "test_resnet")}, "different names"),
        ({"presets": ("best",)}, "no preset called 'best'"),
        ({"full_images": True}, "has no boxes"),
        ({"seeds": 0}, "at least 1"),
        ({"batch_size": 4}, "another study's.*--batch-size"),
        ({"seed": 3}, "sets seed for each"),
    ],
)
def test_mistakes_are_told_before_anything_runs(study: Path, birds: Path, options: dict[str, Any], words: str) -> None:
    before = (study / "table.json").read_text()
    given: dict[str, Any] = {**python_options(), "backbones": BACKBONES, "seeds": 2, **options}
    with pytest.raises(UserError, match=words):
        reproduce(birds, out=study, **given)
    assert (study / "table.json").read_text() == before


def plan(**changes: Any) -> Study:
    settings: dict[str, Any] = {
        "data": "CUB_200_2011",
        "has_boxes": True,
        "out": Path("/out"),
        "backbones": ("vgg19", "resnet34"),
        "weights": ("pretrained", "res.safetensors"),
        "seeds": (0, 1, 2),
        "presets": ("paper", "default"),
        "views": (False, True),
        "as_long": True,
        "interpretability": "",
        "device": "cuda",
        "config_file": None,
        "options": {},
        **changes,
    }
    return Study(**settings)


def test_cropped_and_full_images_are_runs_of_their_own() -> None:
    tasks = {task.name: task for task in make_tasks(plan())}
    # Of each view and seed: two backbones with three baselines and two presets, each pruned, and two combined.
    assert len(tasks) == 2 * 3 * (2 * (3 + 2 * 2) + 2)
    for name, task in tasks.items():
        trains = task.arguments[0] in ("train", "baseline")
        assert ("--full-images" in task.arguments) == (trains and name.startswith("full/"))
        assert all(need.startswith("full/") == name.startswith("full/") for need in task.needs)
    res = tasks["full/seed2/resnet34/default"].arguments
    assert res[res.index("--weights") + 1] == "res.safetensors"
    assert res[res.index("--from-baseline") + 1] == "/out/full/seed2/resnet34/baseline"
    assert res[res.index("--seed") + 1] == "2"


def test_a_baseline_is_trained_as_long_as_each_preset_that_trains() -> None:
    tasks = {task.name: task for task in make_tasks(plan(presets=("quick", "paper", "default"), weights=()))}
    assert "seed0/vgg19/baseline-as-long-as-quick" not in tasks
    for preset, needs in (("paper", ()), ("default", ("seed0/vgg19/baseline",))):
        task = tasks[f"seed0/vgg19/baseline-as-long-as-{preset}"]
        assert task.arguments[0] == "baseline"
        assert "--as-long" in task.arguments
        assert task.arguments[task.arguments.index("--preset") + 1] == preset
        assert "--weights" not in task.arguments  # so that each preset has its own
        assert task.needs == needs
    assert not any("as-long" in task.name for task in make_tasks(plan(as_long=False)))


def test_options_reach_the_stages_that_a_preset_has() -> None:
    study = plan(options={"baseline_epochs": 7, "warm_epochs": 3, "joint_epochs": (4, 5), "skip_bad": True})
    paper, ours = (resolve(preset, **run_options(study, False, 1, 0, preset)).train for preset in ("paper", "default"))
    assert (paper.baseline_epochs, paper.warm_epochs, paper.joint_epochs) == (0, 3, (4, 5))
    assert (ours.baseline_epochs, ours.warm_epochs, ours.joint_epochs) == (7, 0, (4, 5))
    words = next(task.arguments for task in make_tasks(study) if task.name == "seed1/vgg19/default")
    assert "--skip-bad" in words
    assert words[words.index("--joint-epochs") + 1] == "4,5"
