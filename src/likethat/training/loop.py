"""The training loop: the stages of the plan, their epochs, batches, costs and steps.

What makes steps fast is wrapped around them (`wrap_step`), and so are several processes (`average_gradients`): the step
itself is `gradient_step`.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from likethat.config.settings import Config
from likethat.data.loaders import training_batches
from likethat.distributed import broadcast_model
from likethat.errors import Interrupted
from likethat.inference.passes import mixed_precision
from likethat.inference.source_image import leave_source_out
from likethat.models.baseline import BaselineClassifier
from likethat.models.protopnet import ProtoPNet, logits_of_scores
from likethat.models.prototypes import SIMILARITIES, Similarity
from likethat.runtime import freed_memory_kept, seed_for, tf32_convolutions
from likethat.training import losses, stages
from likethat.training.batches import FreshViews, Shown
from likethat.training.course import Course
from likethat.training.forecast import Forecast
from likethat.training.losses import Costs, CostsOf
from likethat.training.micro_batches import parts_of, save_memory
from likethat.training.parallel import average_gradients, check_enough_images, synchronise_norms
from likethat.training.plan import (
    PlanEntry,
    comes_again,
    epochs_to_come,
    learns_statistics,
    make_plan,
    set_learning_rates,
    set_mode,
    steps_of_epoch,
    title_of,
)
from likethat.training.project import check_enough_patches
from likethat.training.state import RunState, Saver, load_run_state
from likethat.training.wrap_step import TakeStep, is_compiled, wrap_step

SEED_NAMES = {"baseline": "classifier"}  # a stage's former name: from a seed follow the same draws as ever


def fit(model: ProtoPNet, baseline: BaselineClassifier | None, course: Course) -> RunState:
    """Train `model` in place. On return it is the best cycle's on validation, projected and optimised.

    `baseline` stands on the model's backbone; it is what prototypes are taken from, where they are.
    """
    check_enough_patches(model, course.train, course.classes)
    state = RunState(model, baseline)
    follow_plan(make_plan(course.config.train), state, course)
    model.load_state_dict(state.best_model)
    broadcast_model(model)
    model.requires_grad_(False).eval()
    return state


def follow_plan(plan: list[PlanEntry], state: RunState, course: Course) -> None:
    """Take a fresh `state` from where the run folder says it was stopped to the end of the plan."""
    synchronise_norms(state.network)
    load_run_state(state, course)
    forecast = Forecast(plan, state.position, course)
    take_step: TakeStep | None = None  # of one stage
    # Where BatchNorm learns, batches stay whole: their memory is short, and is given back.
    epochs = [entry for entry in plan if entry.is_epoch]
    is_short = any(learns_statistics(entry.stage, len(course.train), course.config.train) for entry in epochs)
    with Saver(state, course) as saver, nullcontext() if is_short else freed_memory_kept(course.train.device):
        try:
            while state.position < len(plan):
                entry, known = plan[state.position], len(state.metrics)
                started, is_whole = time.monotonic(), state.batch == 0 and take_step is not None
                with nullcontext() if entry.is_exact else tf32_convolutions():  # where they are not in bf16
                    if entry.is_epoch:
                        to_come = epochs_to_come(plan, state.position)
                        take_step = take_step or make_step(state, entry.stage, course, to_come)
                        train_one_epoch(take_step, entry, state, course, saver, forecast)
                        stages.end_epoch(state, entry, course, started)
                    else:
                        stages.OTHER_STAGES[entry.stage](state, entry, course)
                        state.share()
                if is_whole or not entry.is_epoch:
                    forecast.after_entry(state.position, time.monotonic() - started)
                state.position += 1
                if course.observe:
                    for number, record in enumerate(state.metrics[known:], known):
                        course.observe(number, record)
                if state.position == len(plan) or plan[state.position].stage != entry.stage:
                    take_step = None
                    if not comes_again(state.optimizer_stage, plan, state.position):
                        state.forget_optimizer()
                    saver.save_after_stage()
                saver.save_if_due()
                course.check_stop()
        except Interrupted:
            saver.save()
            raise


def train_one_epoch(
    take_step: TakeStep, entry: PlanEntry, state: RunState, course: Course, saver: Saver, forecast: Forecast
) -> None:
    """Take the steps of one epoch, from the batch that was reached."""
    settings, stage = course.config.train, entry.stage
    optimizer = state.optimizer_for(stage, settings)
    set_mode(state.trained(stage), stage, len(course.train), settings)
    place = (settings.seed, SEED_NAMES.get(stage, stage), entry.epoch)
    counts = (len(course.train), settings.batch_size, settings.views)
    batches = training_batches(*counts, seed_for(*place), course.weight_N)
    check_enough_images(batches.shape[1])
    with course.display.task(title_of(entry, settings)) as advance:
        for number in range(state.batch, len(batches)):
            course.check_stop()
            saver.save_if_due()
            set_learning_rates(optimizer, entry, number / len(batches), settings)
            costs = take_step(batches[number], seed_for(*place, number))
            for name, value in costs.items():
                state.totals[name] = state.totals.get(name, 0) + value / len(batches)
            state.batch = number + 1
            forecast.after_step(state.position, number + 1, len(batches))
            advance(number + 1, len(batches))


def make_step(state: RunState, stage: str, course: Course, epochs: int) -> TakeStep:
    """Return what takes the steps of one stage, in the epochs to come: `gradient_step` on fresh views of a batch."""
    config = course.config

    def costs_of(*shown: Tensor) -> Costs:
        return batch_costs(state, stage, config, *shown)

    known_size = state.backbone_size
    optimizer = state.optimizer_for(stage, config.train)  # decides on what moves, which averaging must know
    if state.backbone_size != known_size:
        course.display.line(
            f"the backbone's learning rate is {state.backbone_size:.2f} times --backbone-lr: so large are its weights "
            "next to ResNet-34's (--no-relative-lr)"
        )
    averaged = average_gradients(state.trained(stage), costs_of)
    augment = config.augment if stage == "joint" else replace(config.augment, cutmix=0.0)
    cells = state.backbone.cells
    middle_Nm2 = None if stage == "baseline" or state.parts is None else state.parts.middles(cells)
    on_NHW = course.on_NHW if config.train.on_mask and stage != "baseline" else None
    source = FreshViews(course.train, augment, cells, middle_Nm2, on_NHW)
    tell, steps = course.display.line, epochs * steps_of_epoch(len(course.train), config.train) - state.batch
    compile = is_compiled(config.train.compile, steps, source.device, stage, tell)
    step = partial(gradient_step, similarity=SIMILARITIES[config.model.similarity])
    learns = learns_statistics(stage, len(course.train), config.train)
    saving = save_memory(step, state.backbone, config.train.batch_size, learns_statistics=learns)
    return wrap_step(saving, averaged, optimizer, source, tell, compile=compile)


def gradient_step(
    shown: Shown,
    costs_of: CostsOf,
    optimizer: torch.optim.Optimizer,
    loss_weight: float = 1.0,
    *,
    similarity: Similarity | None = None,
    at_once: int | None = None,
) -> Costs:
    """Take one step down the costs of what is shown, and return them; one process of several weighs its loss.

    With `at_once`, no more pictures than that are gone through together, and gradients are summed.
    """
    optimizer.zero_grad(set_to_none=True)
    found: Costs = {}
    for part, share in parts_of(shown, at_once):  # costs are means over pictures
        with mixed_precision(part.x_B3HW.device, similarity):
            costs = costs_of(*part)
        weight = loss_weight * share
        loss = costs["loss"] if weight == 1 else costs["loss"] * weight
        loss.backward()
        for name, value in costs.items():
            found[name] = value.detach() if share == 1 else found.get(name, 0.0) + share * value.detach()
    optimizer.step()
    return found


def batch_costs(state: RunState, stage: str, config: Config, *shown: Tensor) -> Costs:
    """Return the costs of one batch, with its accuracy."""
    settings, batch = config.train, Shown(*shown)
    x_B3HW, label_BV, share_BV = batch.own(batch.x_B3HW), batch.label_BV, batch.share_BV
    teacher_logits_BK = None
    if settings.distillation and stage != "baseline" and state.baseline is not None:
        # Until joint training the teacher's backbone is the model's, and its word is enough.
        mirrors = stage == "joint" and config.augment.flip > 0
        teacher_logits_BK = losses.target_logits(state.baseline, x_B3HW, mirrors=mirrors)
    if stage == "baseline":
        assert state.baseline is not None
        logits_BK = state.baseline(x_B3HW)
        costs = losses.baseline_costs(logits_BK, label_BV[:, 0], settings)
    elif isinstance(state.model, BaselineClassifier):
        logits_BK = state.model(x_B3HW)
        costs = losses.answer_costs(logits_BK, label_BV, share_BV, settings, teacher_logits_BK)
    else:
        model = state.protopnet
        z_BDHW, own_KP = model.latent(batch.x_B3HW), model.own_KP
        output = model.head(batch.own(z_BDHW))
        if settings.tie:
            assert state.projection is not None
            with torch.autocast(z_BDHW.device.type, enabled=False):
                score_BP = leave_source_out(output.score_BP, batch.image_BV, state.projection.image_P, own_KP)
            output = replace(output, logits_BK=logits_of_scores(score_BP, model.last_layer.weight))
        logits_BK, of_maps = output.logits_BK, losses.map_costs(model, z_BDHW, batch, settings)
        costs = losses.protopnet_costs(output, label_BV, share_BV, own_KP, settings, teacher_logits_BK, of_maps)
    return {**costs, "accuracy": (logits_BK.argmax(1) == label_BV[:, 0]).float().mean()}
