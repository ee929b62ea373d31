"""What each kind of step in the plan does to a run."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from likethat.config import AUTO_WIDTH, AugmentConfig, Config
from likethat.data.loaders import Images
from likethat.errors import UserError
from likethat.inference.passes import (
    classify_images,
    last_layer_images,
    measure,
    mixed_precision,
)
from likethat.inference.score_cache import cached_scores
from likethat.inference.source_image import leave_source_out
from likethat.models.baseline import PlainClassifier
from likethat.models.protopnet import set_latent_width
from likethat.progress import Display
from likethat.runs import layout
from likethat.runs.atomic_files import copy_state
from likethat.training.choose import embed_sources, start_from_classifier
from likethat.training.last_layer import solve_last_layer
from likethat.training.latent_width import choose_latent_width, describe_choice
from likethat.training.losses import Costs, classifier_costs, protopnet_costs
from likethat.training.phases import Step, learns_from_maps
from likethat.training.project import project
from likethat.training.state import Progress


def costs_of_step(
    progress: Progress,
    step: Step,
    config: Config,
    x_B3HW: Tensor,
    label_BV: Tensor,
    share_BV: Tensor,
    image_BV: Tensor,
) -> Costs:
    """The costs of one batch, with its accuracy: its pictures, and the labels, shares and numbers of the V training
    images that each shows. Where the stage learns from feature maps, they stand in the place of the pictures."""
    settings, model = config.train, progress.model
    if step.stage == "classifier":
        assert progress.plain is not None
        logits_BK = progress.plain(x_B3HW)
        costs = classifier_costs(logits_BK, label_BV[:, 0], settings)
    else:
        maps = learns_from_maps(step.stage, settings)
        output, own_KP = model.of_map(x_B3HW) if maps else model(x_B3HW), model.own_KP
        if settings.tie:
            assert progress.projection is not None
            with torch.autocast(x_B3HW.device.type, enabled=False):
                score_BP = leave_source_out(output.score_BP, image_BV, progress.projection.image_P, own_KP)
                output = replace(output, logits_BK=model.last_layer(score_BP))
        teacher_logits_BK = None
        if settings.distillation and progress.plain is not None:
            with torch.no_grad():
                if step.stage == "joint":
                    teacher_logits_BK = target_logits(progress.plain, x_B3HW, config.augment)
                else:  # until then the teacher's backbone is the model's
                    teacher_logits_BK = (progress.plain.of_map(x_B3HW) if maps else progress.plain(x_B3HW)).float()
        logits_BK = output.logits_BK
        costs = protopnet_costs(output, label_BV, share_BV, own_KP, settings, teacher_logits_BK)
    return {**costs, "accuracy": (logits_BK.argmax(1) == label_BV[:, 0]).float().mean()}


def target_logits(teacher: PlainClassifier, x_B3HW: Tensor, config: AugmentConfig) -> Tensor:
    """The logarithm, up to a constant, of the probabilities to match: the classifier's mean for a view and its mirror
    image, which is right more often than for one of them. Where pictures are not to be mirrored, for the view alone."""
    if not config.flip:
        return teacher(x_B3HW).float()
    both_2BK = teacher(torch.cat([x_B3HW, x_B3HW.flip(-1)])).float().log_softmax(1).unflatten(0, (2, -1))
    return both_2BK.logsumexp(0)


def begin_epoch(progress: Progress, step: Step, train: Images, config: Config) -> None:
    """Tied prototypes follow the network: each epoch starts with what it makes of their patches now."""
    if config.train.tie and step.stage != "classifier":
        assert progress.projection is not None
        with mixed_precision(train.device):
            embed_sources(progress.model, train, progress.projection)


def end_epoch(progress: Progress, step: Step, val: Images, seconds: float, display: Display) -> None:
    means = {name: float(value) for name, value in progress.totals.items()}
    if not abs(means["loss"]) < float("inf"):
        raise UserError(
            f"The loss is not finite in {step}: lower the learning rates by a factor of 10 and train again into "
            "another --out; if it recurs, look at the data with `likethat data check`."
        )
    with mixed_precision(val.device):  # followed, not relied on: what a model is chosen by is measured exactly
        classifier = progress.plain if step.stage == "classifier" else progress.model
        assert classifier is not None
        logits_NK = classify_images(classifier, val)
    measured = measure(logits_NK, val.label_N)
    progress.metrics.append({**asdict(step), "train": means, "val": measured, "seconds": seconds})
    costs = ", ".join(f"{name} {value:.3f}" for name, value in means.items() if name != "accuracy")
    display.line(f"{step}: {costs}; accuracy train {means['accuracy']:.1%}, validation {measured['accuracy']:.1%}")


def choose_prototypes(
    progress: Progress, step: Step, train: Images, val: Images, config: Config, display: Display
) -> None:
    assert progress.plain is not None
    if config.model.latent_width == AUTO_WIDTH:
        _choose_width(progress, progress.plain, train, config, display)
    started = time.monotonic()
    with display.task("choosing prototypes") as advance:
        progress.projection = start_from_classifier(
            progress.model, progress.plain, train, config.train.telling, advance
        )
    progress.make_teacher()
    measured = measure(classify_images(progress.model, val), val.label_N)
    progress.metrics.append({**asdict(step), "val": measured, "seconds": time.monotonic() - started})
    display.line(f"prototypes chosen among the classifier's patches: validation accuracy {measured['accuracy']:.1%}")


def _choose_width(progress: Progress, plain: PlainClassifier, train: Images, config: Config, display: Display) -> None:
    started = time.monotonic()
    with display.task("latent width") as advance:
        choice = choose_latent_width(plain, train, config, advance)
    set_latent_width(progress.model, choice.chosen)
    record = {"stage": "latent_width", "chosen": choice.chosen, "accuracy": choice.accuracy()}
    progress.metrics.append({**record, "images": choice.right_WN.shape[1], "seconds": time.monotonic() - started})
    display.line(describe_choice(choice))


def project_prototypes(
    progress: Progress, step: Step, train: Images, val: Images, classes: tuple[str, ...], display: Display
) -> None:
    started = time.monotonic()
    before = measure(classify_images(progress.model, val), val.label_N)
    with display.task("projection") as advance:
        progress.projection = project(progress.model, train, classes, advance)
    after = measure(classify_images(progress.model, val), val.label_N)
    moved_P = progress.projection.moved_P
    moved = {"mean": float(moved_P.mean()), "max": float(moved_P.max())}
    record = {**asdict(step), "moved": moved, "before": before, "after": after}
    progress.metrics.append({**record, "seconds": time.monotonic() - started})
    display.line(
        f"projection: prototypes moved by {moved['mean']:.3f} on average, {moved['max']:.3f} at most; "
        f"validation accuracy {before['accuracy']:.1%} before, {after['accuracy']:.1%} after"
    )


def optimise_last_layer(
    progress: Progress, step: Step, train: Images, val: Images, config: Config, run: Path, display: Display
) -> None:
    """Convex, on scores computed once. The cycle is kept if it is the best so far on validation."""
    model = progress.model
    unsolved_KP = model.last_layer.weight.detach().clone()
    class_P = model.prototype_layer.class_P
    assert progress.projection is not None
    source_P = progress.projection.image_P if config.train.tie else None
    started = time.monotonic()
    views = last_layer_images(train, config)
    with (
        display.task("scores of the training images") as advance,
        cached_scores(model, views, source_P, run / layout.SCORES, advance) as score_NP,
    ):
        solution = solve_last_layer(
            score_NP,
            views.label_N,
            class_P,
            model.num_classes,
            lam=config.train.l1,
            ridge=config.train.ridge,
            start_KP=unsolved_KP,
        )
    with torch.no_grad():
        model.last_layer.weight.copy_(solution.weight_KP)
    measured = measure(classify_images(model, val), val.label_N)
    record: dict[str, Any] = {
        **asdict(step),
        "objective": solution.objective,
        "kkt_residual": solution.kkt_residual,
        "iterations": solution.iterations,
        "nonzero_negative": solution.nonzero_negative,
        "train": {"accuracy": solution.accuracy},
        "val": measured,
    }
    progress.metrics.append({**record, "seconds": time.monotonic() - started})
    if measured["accuracy"] >= progress.best_accuracy:
        progress.best_accuracy = measured["accuracy"]
        progress.best_model, progress.best_projection = copy_state(model), progress.projection
        progress.best_unsolved_KP = unsolved_KP
    display.line(
        f"last layer: objective {solution.objective:.5f} (optimality residual {solution.kkt_residual:.0e}), "
        f"{solution.nonzero_negative} connections to other classes, validation accuracy {measured['accuracy']:.1%}"
    )
