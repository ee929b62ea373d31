"""The training loop: walks the plan, saves after every step, and goes on exactly where it was stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from likethat import run_dir
from likethat.checkpoint import (
    copy_state,
    load_optimizer_tensors,
    load_tensors,
    optimizer_tensors,
    save_tensors,
    strip_prefix,
    with_prefix,
    write_text,
)
from likethat.config import Config
from likethat.data.loaders import Images, training_batches
from likethat.errors import Interrupted, UserError
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Display
from likethat.runtime import StopFlag, seed_for
from likethat.training.engine import accuracy, measure, score_images, train_step
from likethat.training.last_layer import solve_last_layer
from likethat.training.losses import protopnet_costs
from likethat.training.phases import Step, make_plan, set_learning_rates, set_mode, start_stage
from likethat.training.project import Projection, project

Observer = Callable[[int, dict[str, Any]], None]  # number of the record in metrics.jsonl, the record
SAVE_EVERY = 20.0  # seconds between saves inside a stage; the end of a stage is always saved


@dataclass
class Progress:
    """All that a run has reached: what a checkpoint holds besides the configuration."""

    model: ProtoPNet
    position: int = 0  # in the plan
    batch: int = 0  # done in the current epoch
    totals: dict[str, Tensor] = field(default_factory=dict)  # sums of the epoch's costs
    optimizer: torch.optim.Optimizer | None = None
    optimizer_stage: str = ""
    projection: Projection | None = None
    best_accuracy: float = -1.0  # on validation, of the best cycle so far
    best_model: dict[str, Tensor] = field(default_factory=dict)
    best_projection: Projection | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)


def fit(
    model: ProtoPNet,
    train: Images,
    val: Images,
    classes: tuple[str, ...],
    config: Config,
    run: Path,
    display: Display,
    stop: StopFlag,
    observe: Observer | None = None,
) -> Progress:
    """Trains `model` in place. On return it is the best cycle's on validation, projected and optimised.

    `observe` is called with every new record of metrics.jsonl.
    """
    plan = make_plan(config.train)
    progress = load_progress(model, run, config)
    last_save = time.monotonic()
    try:
        while progress.position < len(plan):
            step = plan[progress.position]
            if step.is_epoch:
                last_save = _train_epoch(progress, step, train, val, config, run, display, stop, last_save)
            elif step.stage == "project":
                _project(progress, step, train, val, classes, display)
            else:
                _optimise_last_layer(progress, step, train, val, config, display)
            progress.position += 1
            if observe:
                observe(len(progress.metrics) - 1, progress.metrics[-1])
            ends_stage = progress.position == len(plan) or plan[progress.position].stage != step.stage
            if ends_stage or time.monotonic() - last_save > SAVE_EVERY:
                save_progress(progress, run)
                last_save = time.monotonic()
            stop.check()
    except Interrupted:
        save_progress(progress, run)
        raise
    model.load_state_dict(progress.best_model)
    model.requires_grad_(False)
    model.eval()
    return progress


def _train_epoch(
    progress: Progress,
    step: Step,
    train: Images,
    val: Images,
    config: Config,
    run: Path,
    display: Display,
    stop: StopFlag,
    last_save: float,
) -> float:
    """One epoch, from the batch that was reached; tells when it saved last."""
    model, settings = progress.model, config.train
    started = time.monotonic()
    optimizer = _optimizer_for(progress, step, config)
    set_mode(model, step.stage)
    own_KP = model.own_KP

    def costs_of(net: nn.Module, x_B3HW: Tensor, label_B: Tensor) -> dict[str, Tensor]:
        output = net(x_B3HW)
        costs = protopnet_costs(output, label_B, own_KP, settings)
        return {**costs, "accuracy": (output.logits_BK.argmax(1) == label_B).float().mean()}

    place = (settings.seed, step.stage, step.epoch)
    batches = training_batches(len(train), settings.batch_size, settings.views, seed_for(*place))
    with display.task(str(step)) as advance:
        for number in range(progress.batch, len(batches)):
            stop.check()
            if time.monotonic() - last_save > SAVE_EVERY:
                save_progress(progress, run)
                last_save = time.monotonic()
            set_learning_rates(optimizer, step, number / len(batches), settings)
            seed = seed_for(*place, number)
            costs = train_step(model, optimizer, costs_of, train, batches[number], config.augment, seed)
            share = len(batches[number]) / (len(train) * settings.views)
            for name, value in costs.items():
                progress.totals[name] = progress.totals.get(name, 0) + value.double() * share
            progress.batch = number + 1
            advance(number + 1, len(batches))
    means = {name: float(value) for name, value in progress.totals.items()}
    _require_finite(means["loss"], step)
    val_logits_NK = model.last_layer(score_images(model, val))
    record = {**asdict(step), "train": means, "val": measure(val_logits_NK, val.label_N)}
    progress.metrics.append({**record, "seconds": time.monotonic() - started})
    progress.batch, progress.totals = 0, {}
    display.line(
        f"{step}: loss {means['loss']:.3f}, cluster {means['cluster']:.3f}, separation {means['separation']:.3f}, "
        f"accuracy train {means['accuracy']:.1%}, validation {record['val']['accuracy']:.1%}"
    )
    return last_save


def _optimizer_for(progress: Progress, step: Step, config: Config) -> torch.optim.Optimizer:
    """One optimiser a stage; that of the joint stage lives on through later cycles."""
    if progress.optimizer is None or progress.optimizer_stage != step.stage:
        progress.optimizer = start_stage(progress.model, step.stage, config.train)
        progress.optimizer_stage = step.stage
    return progress.optimizer


def _require_finite(loss: float, step: Step) -> None:
    if loss != loss or abs(loss) == float("inf"):
        raise UserError(
            f"The loss is not finite in {step}: lower --backbone-lr and --add-on-lr by a factor of 10 and train again "
            "into another --out; if it recurs, look at the data with `likethat data check`."
        )


def _project(
    progress: Progress, step: Step, train: Images, val: Images, classes: tuple[str, ...], display: Display
) -> None:
    model = progress.model
    started = time.monotonic()
    before = measure(model.last_layer(score_images(model, val)), val.label_N)
    with display.task("projection") as advance:
        progress.projection = project(model, train, classes, advance)
    after = measure(model.last_layer(score_images(model, val)), val.label_N)
    moved_P = progress.projection.moved_P
    moved = {"mean": float(moved_P.mean()), "max": float(moved_P.max())}
    record = {**asdict(step), "moved": moved, "before": before, "after": after}
    progress.metrics.append({**record, "seconds": time.monotonic() - started})
    display.line(
        f"projection: prototypes moved by {moved['mean']:.3f} on average, {moved['max']:.3f} at most; "
        f"validation accuracy {before['accuracy']:.1%} before, {after['accuracy']:.1%} after"
    )


def _optimise_last_layer(
    progress: Progress, step: Step, train: Images, val: Images, config: Config, display: Display
) -> None:
    """Convex, on scores computed once. The cycle is kept if it is the best so far on validation."""
    model = progress.model
    started = time.monotonic()
    set_mode(model, step.stage)
    with display.task("scores of the training images") as advance:
        score_NP = score_images(model, train, advance)
    solution = solve_last_layer(
        score_NP,
        train.label_N,
        model.prototype_layer.class_P,
        model.num_classes,
        lam=config.train.l1,
        ridge=config.train.ridge,
        start_KP=model.last_layer.weight.detach(),
    )
    with torch.no_grad():
        model.last_layer.weight.copy_(solution.weight_KP)
    val_score_NP = score_images(model, val)
    measured = measure(val_score_NP @ solution.weight_KP.T, val.label_N)
    record = {
        **asdict(step),
        "objective": solution.objective,
        "kkt_residual": solution.kkt_residual,
        "iterations": solution.iterations,
        "nonzero_negative": solution.nonzero_negative,
        "train": {"accuracy": accuracy(score_NP @ solution.weight_KP.T, train.label_N)},
        "val": measured,
    }
    progress.metrics.append({**record, "seconds": time.monotonic() - started})
    if measured["accuracy"] >= progress.best_accuracy:
        progress.best_accuracy = measured["accuracy"]
        progress.best_model, progress.best_projection = copy_state(model), progress.projection
    display.line(
        f"last layer: objective {solution.objective:.5f} (optimality residual {solution.kkt_residual:.0e}), "
        f"{solution.nonzero_negative} connections to other classes, validation accuracy {measured['accuracy']:.1%}"
    )


def save_progress(progress: Progress, run: Path) -> None:
    """One file, replaced as a whole; metrics.jsonl follows from it."""
    tensors = with_prefix("model", progress.model.state_dict())
    tensors |= with_prefix("totals", progress.totals)
    tensors |= with_prefix("best_model", progress.best_model)
    if progress.optimizer is not None:
        tensors |= with_prefix("optimizer", optimizer_tensors(progress.optimizer))
    for name, projection in (("projection", progress.projection), ("best_projection", progress.best_projection)):
        if projection is not None:
            tensors |= with_prefix(name, vars(projection))
    document = {
        name: getattr(progress, name) for name in ("position", "batch", "optimizer_stage", "best_accuracy", "metrics")
    }
    save_tensors(run / run_dir.STATE, tensors, document)
    write_metrics(run, progress.metrics)


def load_progress(model: ProtoPNet, run: Path, config: Config) -> Progress:
    """The saved state, or a fresh one where there is none."""
    progress = Progress(model)
    if not (run / run_dir.STATE).is_file():
        return progress
    tensors, document = load_tensors(run / run_dir.STATE)
    model.load_state_dict(strip_prefix("model", tensors))
    for name, value in document.items():
        setattr(progress, name, value)
    device = next(model.parameters()).device
    progress.totals = {name: value.to(device) for name, value in strip_prefix("totals", tensors).items()}
    progress.best_model = strip_prefix("best_model", tensors)
    if progress.optimizer_stage:
        progress.optimizer = start_stage(model, progress.optimizer_stage, config.train)
        load_optimizer_tensors(progress.optimizer, strip_prefix("optimizer", tensors))
    if saved := strip_prefix("projection", tensors):
        progress.projection = Projection(**saved)
    if saved := strip_prefix("best_projection", tensors):
        progress.best_projection = Projection(**saved)
    return progress


def write_metrics(run: Path, metrics: list[dict[str, Any]]) -> None:
    write_text(run / run_dir.METRICS, "".join(json.dumps(record) + "\n" for record in metrics))
