"""A step of joint training against a step of the bare classifier: same batch, views, precision and capture."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from likethat.bench.measure import BenchFigure, Goal, compare_peaks, compare_times, in_turn, with_peak
from likethat.bench.setting import Setting
from likethat.data.loaders import Images
from likethat.models.prototypes import SIMILARITIES
from likethat.runtime import tf32_convolutions
from likethat.training.batches import FreshViews
from likethat.training.loop import batch_costs, gradient_step
from likethat.training.losses import Costs, baseline_costs, distillation_cost, target_logits
from likethat.training.plan import set_mode
from likethat.training.project import Projection
from likethat.training.state import RunState
from likethat.training.wrap_step import TakeStep, Tell, wrap_step

THROUGHPUT, STEP_TIME, STREAMED = Goal(0.93, at_least=True), Goal(1.1), Goal(0.9, at_least=True)
MANY = 10_000  # images: enough for BatchNorm to learn its statistics


def training_figures(backbone: str, setting: Setting, tell: Tell) -> list[BenchFigure]:
    figures = [*paper_figures(backbone, setting, tell), *default_figures(backbone, setting, tell)]
    if setting.device.type == "cuda":
        figures.append(streaming_figure(backbone, setting, tell))
    return figures


def paper_figures(backbone: str, setting: Setting, tell: Tell) -> list[BenchFigure]:
    common = (backbone, setting, setting.pictures(4 * setting.batch), tell)
    bare_step = partial(_bare_step, "paper", *common, taught=False)
    _begun(bare_step, setting)  # loads the libraries, which is no one's memory
    (ours, bare), (peak, bare_peak) = _measure([partial(_our_step, "paper", *common), bare_step], setting)
    against, runs = "bare classifier", setting.steps
    return [
        compare_times(backbone, "training step, paper preset", against, ours, bare, _goal(setting), runs=runs),
        *compare_peaks(backbone, "memory of training, paper preset", against, peak, bare_peak),
    ]


def default_figures(backbone: str, setting: Setting, tell: Tell) -> list[BenchFigure]:
    common = (backbone, setting, setting.pictures(4 * setting.batch), tell)
    bare = [partial(_bare_step, "default", *common, taught=taught) for taught in (True, False)]
    times, (peak, taught_peak, _) = _measure([partial(_our_step, "default", *common), *bare], setting)
    ours, taught, baseline = times
    what, against, runs = "training step, default preset", "bare, same teacher", setting.steps
    return [
        compare_times(backbone, what, against, ours, taught, _goal(setting), runs=runs),
        compare_times(backbone, what, "bare, no teacher", ours, baseline, runs=runs),
        *compare_peaks(backbone, "memory of training, default preset", against, peak, taught_peak),
    ]


def streaming_figure(backbone: str, setting: Setting, tell: Tell) -> BenchFigure:
    """Compare steps on pictures that are sent batch by batch with steps on pictures that the device holds."""
    held, streamed = (setting.pictures(4 * setting.batch, held=held) for held in (True, False))
    steps = [partial(_our_step, "paper", backbone, setting, images, tell) for images in (streamed, held)]
    (ours, other), _ = _measure(steps, setting)
    what, against = "training step, pictures sent to the device", "held there"
    return compare_times(backbone, what, against, ours, other, STREAMED, runs=setting.steps)


def _goal(setting: Setting) -> Goal:
    return THROUGHPUT if setting.device.type == "cuda" else STEP_TIME


def _measure(makers: Sequence[Callable[[], TakeStep]], setting: Setting) -> tuple[list[list[float]], list[int | None]]:
    """Return the seconds of each contender's turns, and the memory that it needs to be built and to take one."""
    begun = [with_peak(partial(_begun, make, setting), setting.device) for make in makers]
    return in_turn([turn for _, turn in begun], setting.device, setting.rounds), [peak for peak, _ in begun]


def _begun(make: Callable[[], TakeStep], setting: Setting) -> Callable[[], None]:
    """Return the turn of a contender after taking it once, so that optimiser and capture are there."""
    step, index_B = make(), torch.arange(setting.batch)

    def turn() -> None:
        with tf32_convolutions():  # as in a run's epochs
            for number in range(setting.steps):
                step(index_B, number)

    turn()
    return turn


def _our_step(preset: str, backbone: str, setting: Setting, images: Images, tell: Tell) -> TakeStep:
    """Return a step of joint training as a run makes it, with enough images for BatchNorm to learn its statistics where
    the stage lets it."""
    config = setting.config(preset, backbone)
    model, baseline = setting.networks(config)
    state = RunState(model, baseline if config.train.has_baseline else None)
    if state.baseline is not None:
        state.make_teacher()
    if config.train.tie:
        image_P = torch.arange(setting.prototypes, device=setting.device) % len(images)
        place_P = torch.zeros_like(image_P)
        state.projection = Projection(image_P, place_P, place_P, place_P.float())
    optimizer = state.optimizer_for("joint", config.train)
    set_mode(model, "joint", MANY, config.train)

    def costs_of(*shown: Tensor) -> Costs:
        return batch_costs(state, "joint", config, *shown)

    parts = config.model.prototypes_per_class
    middle_Nm2 = 2 * torch.rand(len(images), parts, 2, device=images.device) - 1
    source = FreshViews(images, config.augment, model.backbone.cells, middle_Nm2)
    step = partial(gradient_step, similarity=SIMILARITIES[config.model.similarity])
    return wrap_step(step, costs_of, optimizer, source, tell, compile=setting.compile)


def _bare_step(preset: str, backbone: str, setting: Setting, images: Images, tell: Tell, *, taught: bool) -> TakeStep:
    """Return a step of the bare network; `taught` as ours is with that preset: by a frozen copy, and with BatchNorm in
    the mode that ours has."""
    config = setting.config(preset, backbone)
    model, baseline = setting.networks(config)
    teacher = copy.deepcopy(baseline).requires_grad_(False) if taught else None
    optimizer = RunState(model, baseline).optimizer_for("baseline", config.train)
    set_mode(model, "joint" if taught else "baseline", MANY, config.train)

    def costs_of(x_B3HW: Tensor, label_BV: Tensor, *_: Tensor) -> Costs:
        logits_BK = baseline(x_B3HW)
        if teacher is None:
            return baseline_costs(logits_BK, label_BV[:, 0], config.train)
        with torch.no_grad():
            teacher_logits_BK = target_logits(teacher, x_B3HW, mirrors=config.augment.flip > 0)
        return {"loss": distillation_cost(logits_BK.float(), teacher_logits_BK)}

    source = FreshViews(images, config.augment, model.backbone.cells)
    step = partial(gradient_step, similarity=SIMILARITIES[config.model.similarity])
    return wrap_step(step, costs_of, optimizer, source, tell, compile=setting.compile)
