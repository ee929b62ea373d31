"""The training loop: walks the plan, saves after every stage, and goes on exactly where it was stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from likethat.config import Config
from likethat.data.loaders import Images, training_batches
from likethat.distributed import any_process, is_first, same_model, world
from likethat.errors import Interrupted, UserError
from likethat.models.baseline import PlainClassifier
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Display
from likethat.runs import layout
from likethat.runtime import StopFlag, seed_for
from likethat.training import steps
from likethat.training.parallel import average_gradients, synchronise_norms
from likethat.training.phases import Step, learns_from_maps, make_plan, set_learning_rates, set_mode
from likethat.training.project import check_enough_patches
from likethat.training.state import Progress, load_progress, save_progress
from likethat.training.train_step import FreshViews, Source, TrainStep
from likethat.training.view_maps import cached_view_maps, rows_of_epoch

SAVE_EVERY = 20.0  # seconds between saves inside a stage; the end of a stage is always saved

Observer = Callable[[int, dict[str, Any]], None]  # number of the record in metrics.jsonl, the record


class Saver:
    """Saves now and then, and when told; of several processes the first."""

    def __init__(self, progress: Progress, run: Path) -> None:
        self.progress, self.run, self.last = progress, run, time.monotonic()

    def save(self) -> None:
        if is_first():
            save_progress(self.progress, self.run)
        self.last = time.monotonic()

    def save_if_due(self) -> None:
        if time.monotonic() - self.last > SAVE_EVERY:
            self.save()


@dataclass(frozen=True)
class Course:
    """What a run learns from and by, where it is kept, and whom it tells; `observe` is called with every new record of
    metrics.jsonl."""

    train: Images
    val: Images
    classes: tuple[str, ...]
    config: Config
    run: Path
    display: Display
    stop: StopFlag
    observe: Observer | None = None


def fit(model: ProtoPNet, plain: PlainClassifier | None, course: Course) -> Progress:
    """Trains `model` in place. On return it is the best cycle's on validation, projected and optimised.

    `plain` is the classifier on the model's backbone that prototypes are taken from, where they are.
    """
    check_enough_patches(model, course.train, course.classes)
    progress = Progress(model, plain)
    follow_plan(make_plan(course.config.train), progress, course)
    model.load_state_dict(progress.best_model)
    same_model(model)
    model.requires_grad_(False)
    model.eval()
    return progress


def follow_plan(plan: list[Step], progress: Progress, course: Course) -> None:
    """Takes fresh `progress` from where the run folder says it was stopped to the end of the plan."""
    train, val, config, display = course.train, course.val, course.config, course.display
    synchronise_norms(progress.model)
    load_progress(progress, course.run, config.train)
    saver = Saver(progress, course.run)
    train_step = None
    try:
        with ExitStack() as kept:  # for one stage
            while progress.position < len(plan):
                step, started, known = plan[progress.position], time.monotonic(), len(progress.metrics)
                if step.is_epoch:
                    if train_step is None:
                        train_step = _make_step(progress, step, course, kept)
                    _train_epoch(progress, step, train_step, course, saver, started)
                elif step.stage == "choose":
                    steps.choose_prototypes(progress, step, train, val, config, display)
                elif step.stage == "project":
                    steps.project_prototypes(progress, step, train, val, course.classes, display)
                else:
                    steps.optimise_last_layer(progress, step, train, val, config, course.run, display)
                if not step.is_epoch:
                    same_model(progress.model)
                    progress.share_projection()
                progress.position += 1
                if course.observe:
                    for number, record in enumerate(progress.metrics[known:], known):
                        course.observe(number, record)
                if progress.position == len(plan) or plan[progress.position].stage != step.stage:
                    train_step = None
                    kept.close()
                    saver.save()
                saver.save_if_due()
                check_stop(course.stop)
    except Interrupted:
        saver.save()
        raise


def _make_step(progress: Progress, step: Step, course: Course, kept: ExitStack) -> TrainStep:
    """For one stage; what must be put away after it goes to `kept`."""
    train, config, display = course.train, course.config, course.display

    def costs_of(*shown: Tensor) -> dict[str, Tensor]:
        return steps.costs_of_step(progress, step, config, *shown)

    optimizer = progress.optimizer_for(step.stage, config.train)
    trained = progress.plain if step.stage == "classifier" else progress.model
    assert trained is not None
    source: Source = FreshViews(train, config.augment if step.stage == "joint" else replace(config.augment, cutmix=0.0))
    if learns_from_maps(step.stage, config.train):
        file, backbone = course.run / layout.MAPS, progress.model.backbone
        with display.task("feature maps of the views") as advance:
            maps = cached_view_maps(backbone, train, config, file, lambda: check_stop(course.stop), advance)
            source = kept.enter_context(maps)
    averaged = average_gradients(trained, costs_of)
    return TrainStep(optimizer, averaged, source, display.line, compile=config.train.compile)


def check_stop(stop: StopFlag) -> None:
    """Processes that train together stop together."""
    if any_process(stop.requested):
        raise Interrupted


def _train_epoch(
    progress: Progress, step: Step, train_step: TrainStep, course: Course, saver: Saver, started: float
) -> None:
    """One epoch, from the batch that was reached."""
    train, settings = course.train, course.config.train
    if progress.batch == 0:
        steps.begin_epoch(progress, step, train, course.config)
    set_mode(progress.model, step.stage, len(train), settings)
    place = (settings.seed, step.stage, step.epoch)
    batches = training_batches(len(train), settings.batch_size, settings.views, seed_for(*place))
    if learns_from_maps(step.stage, settings):
        batches = rows_of_epoch(batches, len(train), step.epoch, settings)
    if batches.shape[1] < world():
        raise UserError(
            f"A step has {batches.shape[1]} images for {world()} processes; start fewer, or pass a larger --batch-size."
        )
    with course.display.task(str(step)) as advance:
        for number in range(progress.batch, len(batches)):
            check_stop(course.stop)
            saver.save_if_due()
            set_learning_rates(train_step.optimizer, step, number / len(batches), settings)
            costs = train_step(batches[number], seed_for(*place, number))
            for name, value in costs.items():
                progress.totals[name] = progress.totals.get(name, 0) + value / len(batches)
            progress.batch = number + 1
            advance(number + 1, len(batches))
    steps.end_epoch(progress, step, course.val, time.monotonic() - started, course.display)
    progress.batch, progress.totals = 0, {}
