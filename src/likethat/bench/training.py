"""A step of joint training against a step of the bare classifier: same batch, views, precision and recording."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from likethat.bench.measure import Figure, Goal, compare, compare_peaks, in_turn, with_peak
from likethat.bench.setting import Setting
from likethat.data.loaders import Images
from likethat.training.losses import Costs, classifier_costs, distillation_cost
from likethat.training.phases import Step, set_mode
from likethat.training.project import Projection
from likethat.training.state import Progress
from likethat.training.steps import costs_of_step
from likethat.training.train_step import TrainStep

THROUGHPUT, STEP_TIME = Goal(0.93, at_least=True), Goal(1.1)
MANY = 10_000  # images: enough for BatchNorm to learn its statistics

Tell = Callable[[str], None]


def training_figures(backbone: str, setting: Setting, tell: Tell) -> list[Figure]:
    images, runs = setting.pictures(4 * setting.batch), setting.steps
    common = (backbone, setting, images, tell)
    goal = THROUGHPUT if setting.device.type == "cuda" else STEP_TIME
    _begun(lambda: _bare_step("paper", *common, taught=False), setting)  # loads the libraries, which is no one's memory
    (paper, bare), (paper_peak, bare_peak) = _measure(
        [lambda: _our_step("paper", *common), lambda: _bare_step("paper", *common, taught=False)], setting
    )
    (default, taught, plain), (default_peak, taught_peak, _) = _measure(
        [
            lambda: _our_step("default", *common),
            lambda: _bare_step("default", *common, taught=True),
            lambda: _bare_step("default", *common, taught=False),
        ],
        setting,
    )
    step, memory = "training step, {} preset", "memory of training, {} preset"
    return [
        compare(backbone, step.format("paper"), "bare classifier", paper, bare, goal, runs=runs),
        compare(backbone, step.format("default"), "bare, same teacher", default, taught, goal, runs=runs),
        compare(backbone, step.format("default"), "bare, no teacher", default, plain, runs=runs),
        *compare_peaks(backbone, memory.format("paper"), "bare classifier", paper_peak, bare_peak),
        *compare_peaks(backbone, memory.format("default"), "bare, same teacher", default_peak, taught_peak),
    ]


def _measure(makers: Sequence[Callable[[], TrainStep]], setting: Setting) -> tuple[list[list[float]], list[int | None]]:
    """Seconds of each contender's turns, and the memory that it needs to be built and to take one."""
    begun = [with_peak(partial(_begun, make, setting), setting.device) for make in makers]
    return in_turn([turn for _, turn in begun], setting.device, setting.rounds), [peak for peak, _ in begun]


def _begun(make: Callable[[], TrainStep], setting: Setting) -> Callable[[], None]:
    """The turn of a contender, taken once: optimiser and recording are there afterwards."""
    step, index_B = make(), torch.arange(setting.batch)

    def turn() -> None:
        for number in range(setting.steps):
            step(index_B, number)

    turn()
    return turn


def _our_step(preset: str, backbone: str, setting: Setting, images: Images, tell: Tell) -> TrainStep:
    config, step = setting.config(preset, backbone), Step("joint")
    model, plain = setting.networks(config)
    progress = Progress(model, plain if config.train.has_classifier else None)
    if progress.plain is not None:
        progress.make_teacher()
    if config.train.tie:
        image_P = torch.arange(setting.prototypes, device=setting.device) % len(images)
        place_P = torch.zeros_like(image_P)
        progress.projection = Projection(image_P, place_P, place_P, place_P.float())
    optimizer = progress.optimizer_for(step.stage, config.train)
    set_mode(model, step.stage, MANY, config.train)

    def costs_of(x_B3HW: Tensor, label_B: Tensor, image_BV: Tensor) -> Costs:
        return costs_of_step(progress, step, config, x_B3HW, label_B, image_BV)

    return TrainStep(optimizer, costs_of, images, config.augment, tell)


def _bare_step(preset: str, backbone: str, setting: Setting, images: Images, tell: Tell, *, taught: bool) -> TrainStep:
    """`taught` as ours is with that preset: by a frozen copy, and with BatchNorm in the mode that ours has."""
    config = setting.config(preset, backbone)
    model, plain = setting.networks(config)
    teacher = copy.deepcopy(plain).requires_grad_(False) if taught else None
    optimizer = Progress(model, plain).optimizer_for("classifier", config.train)
    set_mode(model, "joint" if taught else "classifier", MANY, config.train)

    def costs_of(x_B3HW: Tensor, label_B: Tensor, image_BV: Tensor) -> Costs:
        logits_BK = plain(x_B3HW)
        if teacher is None:
            return classifier_costs(logits_BK, label_B, config.train)
        with torch.no_grad():
            teacher_logits_BK = teacher(x_B3HW).float()
        return {"loss": distillation_cost(logits_BK.float(), teacher_logits_BK)}

    return TrainStep(optimizer, costs_of, images, config.augment, tell)
