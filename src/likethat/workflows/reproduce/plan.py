"""Which runs the table is made of, where they lie, and the command that makes each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm

from likethat.config import presets
from likethat.errors import UserError
from likethat.models.backbone import TORCHVISION
from likethat.runs import layout
from likethat.training.plan import make_counterpart_plan
from likethat.workflows.run_setup import check_same_config

BASELINE, COMBINED, PRUNED = "baseline", "combined", "-pruned"  # names of folders, the last one a suffix
MEASURED = "-interpretability"  # a suffix, of the task that measures a run's explanations
AS_LONG = "baseline-as-long-as-"  # a prefix, before the preset


@dataclass(frozen=True)
class Study:
    """What was asked for. `views` says for each block of the table whether boxes are ignored."""

    data: str
    has_boxes: bool
    out: Path  # absolute: runs remember where their classifier lies
    backbones: tuple[str, ...]
    weights: tuple[str, ...]  # one a backbone; none at all: each preset's own
    seeds: tuple[int, ...]
    presets: tuple[str, ...]
    views: tuple[bool, ...]
    as_long: bool  # whether baselines are also trained as long as the ProtoPNet of each preset
    interpretability: str  # part of the data that explanations are measured on, "val" or "test"; empty: they are not
    device: str
    config_file: Path | None
    options: Mapping[str, Any]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the models that every backbone has: baselines first, then presets."""
        trained = [preset for preset in self.presets if self.as_long and _has_epochs(preset)]
        return (BASELINE, *(f"{AS_LONG}{preset}" for preset in trained), *self.presets)

    def folder(self, full: bool, seed: int, backbone: str, kind: str) -> str:
        """Return the folder of a run, relative to the study's; `kind` is one of `kinds`. The folder of a
        combined run names its members, so that a study with more backbones makes another."""
        backbone = "+".join(self.backbones) if backbone == COMBINED else backbone
        return f"{'full/' if full else ''}seed{seed}/{backbone}/{kind}"


@dataclass(frozen=True)
class Task:
    """One run: its folder in the study, the arguments of `likethat` that make it, the runs it is made from. A task
    that makes no run leaves a `result`, a file in the study."""

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    result: str = ""

    def is_done(self, out: Path) -> bool:
        """Return whether its run or its result is there."""
        return (out / self.result).is_file() if self.result else layout.is_finished(out / self.name)


def check_study(study: Study) -> None:
    """Report mistakes before the first run begins."""
    for words, what in ((study.backbones, "--backbones"), (study.presets, "--presets")):
        if not words or len(set(words)) < len(words):
            raise UserError(f"{what} takes one or more different names.")
    for backbone in study.backbones:
        if not timm.is_model(backbone):
            raise UserError(f"There is no timm model called '{backbone}'; name others with --backbones.")
    for weights in study.weights:
        if weights not in ("pretrained", TORCHVISION, "none") and not Path(weights).is_file():
            raise UserError(
                f"The weights file {weights} does not exist; pass 'pretrained', 'torchvision', 'none' or a file."
            )
    if True in study.views and not study.has_boxes:
        raise UserError(f"{study.data} has no boxes, so its pictures are whole already; leave --full-images out.")
    for full in study.views:
        for seed in study.seeds:
            for number in range(len(study.backbones)):
                for kind in study.kinds:
                    _check_run(study, full, seed, number, kind)


def _check_run(study: Study, full: bool, seed: int, number: int, kind: str) -> None:
    """Check that a run that is there already is of this study."""
    asked = presets.resolve(preset_of(kind), study.config_file, **run_options(study, full, seed, number, kind))
    run = study.out / study.folder(full, seed, study.backbones[number], kind)
    if (run / layout.CONFIG).is_file():
        try:
            check_same_config(layout.read_record(run), asked)
        except UserError as error:
            raise UserError(f"{run} is another study's. {error}") from error


def preset_of(kind: str) -> str:
    return "default" if kind == BASELINE else kind.removeprefix(AS_LONG)


def is_baseline(kind: str) -> bool:
    return kind == BASELINE or kind.startswith(AS_LONG)


def _has_epochs(preset: str) -> bool:
    """Return whether the preset trains anything; one that does not has no counterpart that is trained as long."""
    plan = make_counterpart_plan(presets.resolve(preset).train)
    return any(entry.is_epoch for entry in plan)


def run_options(study: Study, full: bool, seed: int, number: int, kind: str) -> dict[str, Any]:
    """Return the options of a kind of model. Options of a stage go to the presets that have it."""
    backbone = study.backbones[number]
    own = presets.resolve(preset_of(kind), backbone=backbone).train
    options = {
        name: value for name, value in study.options.items() if not name.endswith("_epochs") or getattr(own, name)
    }
    if not own.baseline_epochs and options.get("latent_width") == "auto":
        del options["latent_width"]  # it takes a baseline; the published number stays
    if not own.has_baseline:
        options.pop("decisive_parts", None)  # it chooses among a baseline's patches
    options |= {"seed": seed, "backbone": backbone}
    if study.weights:
        options["weights"] = study.weights[number]
    if full:
        options["full_images"] = True
    if kind != BASELINE and own.baseline_epochs:
        options["from_baseline"] = str(study.out / study.folder(full, seed, backbone, BASELINE))
    return options


def make_tasks(study: Study) -> list[Task]:
    """Return every run of the study, one seed after the other, so that a table with all its rows is there early."""
    tasks = []
    for seed in study.seeds:
        for full in study.views:
            for number, backbone in enumerate(study.backbones):
                tasks += _runs_of(study, full, seed, number, backbone)
            tasks += _combinations(study, full, seed)
    return tasks


def _runs_of(study: Study, full: bool, seed: int, number: int, backbone: str) -> list[Task]:
    tasks = []
    for kind in study.kinds:
        name = study.folder(full, seed, backbone, kind)
        options = run_options(study, full, seed, number, kind)
        verb = "baseline" if is_baseline(kind) else "train"
        arguments = [verb, study.data, "--out", str(study.out / name), "--resume", "--preset", preset_of(kind)]
        if kind.startswith(AS_LONG):
            arguments.append("--as-long")
        if study.config_file:
            arguments += ["--config", str(study.config_file)]
        arguments += [*flags(options), "--device", study.device]
        needs = [study.folder(full, seed, backbone, BASELINE)] if "from_baseline" in options else []
        tasks.append(Task(name, tuple(arguments), tuple(needs)))
        if not is_baseline(kind):
            # A class whose prototypes are all mixed keeps its best one, so that a study is not lost over it.
            pruning = ["prune", str(study.out / name), "--out", str(study.out / f"{name}{PRUNED}"), "--keep-one"]
            tasks.append(Task(f"{name}{PRUNED}", (*pruning, "--device", study.device), (name,)))
            if study.interpretability:
                tasks.append(_measurement(study, name))
    return tasks


def _measurement(study: Study, name: str) -> Task:
    """Return the task that measures a run's explanations. It writes into the run, so it waits until that is pruned."""
    measuring = ("evaluate", str(study.out / name), "--interpretability", "--part", study.interpretability)
    result = f"{name}/{layout.INTERPRETABILITY[study.interpretability]}"
    needs = (name, f"{name}{PRUNED}")
    return Task(f"{name}{MEASURED}", (*measuring, "--device", study.device), needs, result)


def _combinations(study: Study, full: bool, seed: int) -> list[Task]:
    if len(study.backbones) < 2:
        return []
    tasks = []
    for preset in study.presets:
        name = study.folder(full, seed, COMBINED, preset)
        members = [study.folder(full, seed, backbone, preset) for backbone in study.backbones]
        paths = [str(study.out / member) for member in members]
        arguments = ("combine", *paths, "--out", str(study.out / name), "--device", study.device)
        tasks.append(Task(name, arguments, tuple(members)))
    return tasks


def flags(options: Mapping[str, Any]) -> list[str]:
    """Return the options as they are typed."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
            words += [f"--{flag}={text}"] if text.startswith("-") else [f"--{flag}", text]
    return words
