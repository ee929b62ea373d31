"""How long a run will take on this machine, and what would shorten it."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from likethat.config.presets import quick
from likethat.config.settings import Config
from likethat.progress import in_words
from likethat.training.course import Course
from likethat.training.losses import EVERY
from likethat.training.plan import PlanEntry, make_plan

# Steps of a stage that say nothing about the others: on a GPU kernels are chosen, captured or compiled in them.
SETTLING, SETTLING_ON_GPU = 1, 4
FEWEST, LEAST_SECONDS = 4, 2.0  # steps or seconds after these that a forecast is made from
LONG = 600.0  # seconds of a run on a CPU from which on it is told what would shorten it


def pictures_of(entry: PlanEntry, config: Config, train: int, val: int) -> float:
    """Return the work of an entry of the plan, in pictures that pass the network: going back costs as much as two."""
    settings, step = config.train, train * config.train.views
    if entry.stage == "baseline":
        return 3 * step + val
    if entry.is_epoch:
        sights = 2 if entry.stage == "joint" and config.augment.flip > 0 else 1
        teacher = sights if settings.distillation and settings.has_baseline else 0
        attacked = 5 / EVERY if settings.context else 0  # there, to the picture and back, and there and back
        return ((3 if entry.stage == "joint" else 1) + teacher + attacked) * step + val
    return {
        "parts": train,
        "choose": (0 if settings.fit_head else train) + val,
        "teach": 0,
        "keep": val,
        "project": train + val,
        "last_layer": settings.last_layer_views * train,
    }[entry.stage]


class Forecast:
    """Follows a run and says how long the rest of it takes: in the display's note, and once in a line."""

    def __init__(self, plan: list[PlanEntry], position: int, course: Course) -> None:
        self.plan, self.course, self.resumed = plan, course, position > 0
        self.started = time.monotonic()
        self.seconds_of_picture: dict[str, float] = {}  # by stage
        self.told = False
        self.mark = 0.0  # when the steps that count began
        self.steps, self.stage = 0, ""

    def after_step(self, position: int, done: int, total: int) -> None:
        """Count a step: `done` of the `total` of its epoch. The device is waited for twice a stage."""
        entry = self.plan[position]
        if entry.stage != self.stage:
            self.stage, self.steps = entry.stage, 0
        self.steps += 1
        settling = SETTLING_ON_GPU if self.course.train.device.type == "cuda" else SETTLING
        if self.steps == settling:
            self.mark = self._now()
        counted = self.steps - settling
        if entry.stage not in self.seconds_of_picture and counted > 0:
            if time.monotonic() - self.mark < LEAST_SECONDS and (counted < FEWEST or done < total):
                return
            seconds = (self._now() - self.mark) / counted
            self.seconds_of_picture[entry.stage] = seconds * total / self._pictures(entry)
        self._tell(position, done / total)

    def after_entry(self, position: int, seconds: float) -> None:
        """Learn from an entry of the plan that took so long from its beginning to its end."""
        entry = self.plan[position]
        if pictures := self._pictures(entry):
            self.seconds_of_picture[entry.stage] = seconds / pictures
        self._tell(position + 1, 0.0)

    def left(self, position: int, share: float = 0.0) -> float | None:
        """Return the seconds from here to the end of the plan; None before anything was measured, and while epochs are
        to come and none was: what comes before them is over too soon to tell."""
        measured = {entry.stage for entry in self.plan if entry.is_epoch} & self.seconds_of_picture.keys()
        if not self.seconds_of_picture or (not measured and any(entry.is_epoch for entry in self.plan[position:])):
            return None
        latest = list(self.seconds_of_picture.values())[-1]
        rest = [
            self._pictures(entry) * self.seconds_of_picture.get(entry.stage, latest) for entry in self.plan[position:]
        ]
        return sum(rest) - (share * rest[0] if rest else 0.0)

    def _tell(self, position: int, share: float) -> None:
        left, display = self.left(position, share), self.course.display
        if left is None:
            return
        display.note = f"about {in_words(left)} to the end of the run" if position < len(self.plan) else ""
        if self.told or not any(entry.is_epoch and entry.stage in self.seconds_of_picture for entry in self.plan):
            return
        self.told = True
        whole = left if self.resumed else time.monotonic() - self.started + left
        what = "the rest of the run" if self.resumed else "the whole run"
        display.line(f"{what} takes about {in_words(whole)} on this machine")
        if self.course.train.device.type == "cpu" and whole > LONG:
            ways = [f"{option} about {in_words(seconds)}" for option, seconds in self.shortcuts()[:2]]
            display.line(f"note: a new run takes less with {', with '.join(ways)}")

    def shortcuts(self) -> list[tuple[str, float]]:
        """Return settings that would make a run like this one shorter, with its seconds then; the shortest first."""
        config, latest = self.course.config, list(self.seconds_of_picture.values())[-1]
        stages = {entry.stage for entry in self.plan}
        settings, (height, width) = config.train, config.model.input_size
        ways = {}
        if "project" in stages:
            ways["--preset quick"] = replace(config, train=quick(config.model.backbone).train)
        for name in ("baseline_epochs", "views"):
            if (value := getattr(settings, name)) >= 4:
                less = replace(settings, **{name: value // 4})
                ways[f"--{name.replace('_', '-')} {value // 4}"] = replace(config, train=less)
        if max(settings.joint_epochs) >= 4:
            fewer = tuple(epochs // 4 for epochs in settings.joint_epochs)
            written = ",".join(map(str, fewer))
            ways[f"--joint-epochs {written}"] = replace(config, train=replace(settings, joint_epochs=fewer))
        smaller = (height * 5 // 7 // 32 * 32, width * 5 // 7 // 32 * 32)
        if min(smaller) >= 96:
            model = replace(config.model, input_size=smaller)
            ways[f"--input-size {smaller[0]}x{smaller[1]}"] = replace(config, model=model)
        found = []
        for option, other in ways.items():
            plan = [entry for entry in make_plan(other.train) if entry.stage in {*stages, "parts", "choose"}]
            area = other.model.input_size[0] * other.model.input_size[1] / (height * width)
            found.append((option, latest * area * sum(self._pictures(entry, other) for entry in plan)))
        return sorted(found, key=lambda way: way[1])

    def _pictures(self, entry: PlanEntry, config: Config | None = None) -> float:
        course = self.course
        return pictures_of(entry, config or course.config, len(course.train), len(course.val))

    def _now(self) -> float:
        if self.course.train.device.type == "cuda":
            torch.cuda.synchronize(self.course.train.device)
        return time.monotonic()
