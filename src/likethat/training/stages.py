"""What the stages of a run do besides gradient descent: around an epoch, and instead of one."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from likethat.config.settings import AUTO_WIDTH
from likethat.data.loaders import Images
from likethat.errors import UserError
from likethat.inference.feature_maps import FeatureMaps, maps_if_they_fit
from likethat.inference.memory_map import too_large
from likethat.inference.passes import (
    classify_images,
    last_layer_images,
    latents_of,
    logits_by,
    logits_of_kept,
    measure,
    mixed_precision,
    own_batches_of,
)
from likethat.inference.score_cache import cached_scores
from likethat.models.backbone import Backbone, configured_backbone, place
from likethat.models.baseline import BaselineClassifier
from likethat.models.protopnet import set_latent_width
from likethat.models.prototypes import SIMILARITIES
from likethat.runs import layout
from likethat.runs.atomic_files import copy_state
from likethat.runtime import seed_for
from likethat.training.choose import start_from_baseline
from likethat.training.course import Course
from likethat.training.head import fit_head
from likethat.training.last_layer import of_views, solve_last_layer, terms_of
from likethat.training.latent_width import choose_latent_width, describe_choice
from likethat.training.parts import find_parts
from likethat.training.plan import PlanEntry, title_of
from likethat.training.project import project
from likethat.training.state import RunState

PIECED = (
    "note: from here on a piece of another picture covers part of each view, so the training accuracy falls; "
    "the validation accuracy is of whole pictures"
)
GUESSING = 0.99  # of the cross entropy of somebody who knows how frequent each class is, and nothing else
NOTHING_LEARNED = (
    "Warning: the baseline has learned nothing: it guesses, as prototypes of its patches would. Train again with a "
    "lower --baseline-lr, or with more --baseline-epochs, over which learning rates rise more slowly."
)


def end_epoch(state: RunState, entry: PlanEntry, course: Course, started: float) -> None:
    """Measure the network on validation images, and tell; `started` is when the epoch began."""
    val, title = course.val, title_of(entry, course.config.train)
    means = {name: float(value) for name, value in state.totals.items()}
    if not abs(means["loss"]) < float("inf"):
        raise UserError(
            f"The loss is not finite in {title}: lower the learning rates by a factor of 10 and train again into "
            "another --out; if it recurs, look at the data with `likethat data check`."
        )
    # Followed, not relied on: what a model is chosen by is measured exactly.
    with mixed_precision(val.device, SIMILARITIES[course.config.model.similarity]):
        network = state.baseline if entry.stage == "baseline" else state.model
        assert network is not None
        with course.display.task("validation images") as advance:
            measured = measure(classify_images(network, val, advance), val.label_N)
    record = {**asdict(entry), "train": means, "val": measured}
    state.metrics.append({**record, "seconds": time.monotonic() - started})
    costs = ", ".join(f"{name} {value:.3f}" for name, value in means.items() if name != "accuracy")
    shown = f"accuracy train {means['accuracy']:.1%}, validation {measured['accuracy']:.1%}"
    note = f"; {course.display.note}" if course.display.note else ""
    course.display.line(f"{title}: {costs}; {shown}{note}")
    if entry.stage == "joint" and entry.epoch == 0 and course.config.augment.cutmix > 0:
        course.display.line(PIECED)
    is_end = entry.stage == "baseline" and entry.epoch + 1 == course.config.train.baseline_epochs
    if is_end and means["cross_entropy"] > GUESSING * _entropy_of_guessing(course):
        course.display.line(NOTHING_LEARNED)
    state.batch, state.totals = 0, {}


def _entropy_of_guessing(course: Course) -> float:
    """Return the least cross entropy that can be reached without looking: that of the smoothed labels."""
    label_N, classes, smoothing = course.train.label_N.cpu(), len(course.classes), course.config.train.label_smoothing
    chance_K = label_N.bincount(course.weight_N, minlength=classes) / len(label_N)
    return float(torch.special.entr((1 - smoothing) * chance_K + smoothing / classes).sum())


def find_parts_of_images(state: RunState, entry: PlanEntry, course: Course) -> None:
    """Find the parts that prototypes will show, by the backbone's weights before any training: fine-tuning for classes
    makes patches of one class alike, whatever part they show."""
    config, display, started = course.config, course.display, time.monotonic()
    backbone, count = _untrained_backbone(state, course).eval(), config.model.prototypes_per_class
    with display.task("parts of the pictures") as advance:
        maps = maps_if_they_fit(backbone, course.train, advance)
        used = state.protopnet.prototypes_of_class if config.train.decisive_parts else None
        state.parts = find_parts(backbone, maps, count, _cells_to_choose(course), used, advance)
    if config.train.fit_head and isinstance(maps, FeatureMaps):
        state.maps = maps
    shown_m = state.parts.shown_Nm.float().mean(0).tolist()
    state.metrics.append({**asdict(entry), "shown": shown_m, "seconds": time.monotonic() - started})
    display.line(f"{count} parts found, each in {min(shown_m):.0%} to {max(shown_m):.0%} of the training images")


def _untrained_backbone(state: RunState, course: Course) -> Backbone:
    """Return the run's backbone, which nothing has trained yet; or one with the weights that it is configured with,
    where a finished baseline's is the run's."""
    config = course.config
    if not config.train.from_baseline:
        return state.backbone
    torch.manual_seed(seed_for(config.train.seed, "weights"))  # where they are random, those that training begins with
    try:
        return place(configured_backbone(config.model, config.model.weights), course.train.device)
    except UserError as error:
        course.display.line(f"note: parts are found by the baseline's own weights ({error})")
        return state.backbone


def _cells_to_choose(course: Course) -> Tensor | None:
    """Return the cells that prototypes may be taken from, where not from all."""
    return course.on_NHW if course.config.data.on_object else None


def choose_prototypes(state: RunState, entry: PlanEntry, course: Course) -> None:
    """Take prototypes from the baseline's patches; from then on it is the teacher."""
    model, baseline, val, display = state.protopnet, state.baseline, course.val, course.display
    assert baseline is not None
    started = time.monotonic()
    with display.task("feature maps") as advance:
        images = state.maps or maps_if_they_fit(baseline.backbone, course.train, advance)
    state.maps = None
    if course.config.train.fit_head:
        _fit_head(baseline, images, course)
    if course.config.model.latent_width == AUTO_WIDTH:
        started += _choose_width(state, baseline, images, course)
    assert state.parts is not None
    state.projection = start_from_baseline(model, baseline, images, state.parts, course.config.train.add_on_start)
    state.make_teacher()
    measured = measure(classify_images(model, val), val.label_N)
    state.metrics.append({**asdict(entry), "val": measured, "seconds": time.monotonic() - started})
    display.line(f"prototypes chosen among the baseline's patches: validation accuracy {measured['accuracy']:.1%}")


def _fit_head(baseline: BaselineClassifier, images: Images | FeatureMaps, course: Course) -> None:
    """Fit the baseline's head to what the frozen backbone makes of the training images."""
    fit_head(baseline, images, course.config.train.label_smoothing, course.weight_N)
    measured = measure(classify_images(baseline, course.val), course.val.label_N)
    course.display.line(f"baseline on the backbone as it is: validation accuracy {measured['accuracy']:.1%}")


def _choose_width(state: RunState, baseline: BaselineClassifier, images: Images | FeatureMaps, course: Course) -> float:
    """Choose the width of the latent map; return the seconds that it took."""
    assert state.parts is not None
    started = time.monotonic()
    with course.display.task("latent width") as advance:
        choice = choose_latent_width(baseline, images, state.parts, course.config, advance)
    set_latent_width(state.protopnet, choice.chosen)
    seconds = time.monotonic() - started
    record = {"stage": "latent_width", "chosen": choice.chosen, "accuracy": choice.accuracy()}
    state.metrics.append({**record, "images": choice.right_WN.shape[1], "seconds": seconds})
    course.display.line(describe_choice(choice))
    return seconds


def project_prototypes(state: RunState, entry: PlanEntry, course: Course) -> None:
    """Put every prototype on the nearest training patch of its class."""
    model, val, display = state.protopnet, course.val, course.display
    started = time.monotonic()
    with display.task("projection") as advance:
        search = (course.train, course.classes, advance, _cells_to_choose(course))
        state.projection = project(model, *search, is_rough=entry.cycle + 1 < len(course.config.train.joint_epochs))
    layers = (model.prototype_layer.before_projection(), model.prototype_layer)
    heads = [(layer, model.last_layer.weight) for layer in layers]
    size = len(val), len(model.prototype_layer.class_P)
    state.val_score_NP = None if too_large(4 * math.prod(size), val.device) else torch.zeros(size, device=val.device)
    latents = latents_of(model, own_batches_of(val))
    logits = logits_by(heads, latents, len(val), val.device, state.val_score_NP)
    before, after = (measure(logits_NK, val.label_N) for logits_NK in logits)
    moved_P = state.projection.moved_P
    moved = {"mean": float(moved_P.mean()), "max": float(moved_P.max())}
    record = {**asdict(entry), "moved": moved, "before": before, "after": after}
    state.metrics.append({**record, "seconds": time.monotonic() - started})
    display.line(
        f"projection: prototypes moved by {moved['mean']:.3f} on average, {moved['max']:.3f} at most; "
        f"validation accuracy {before['accuracy']:.1%} before, {after['accuracy']:.1%} after"
    )


def optimise_last_layer(state: RunState, entry: PlanEntry, course: Course) -> None:
    """Solve the last layer, a convex problem, on scores computed once. Keep the cycle if it validates best so far."""
    model, val, config, display = state.protopnet, course.val, course.config, course.display
    unsolved_KP = model.last_layer.weight.detach().clone()
    class_P = model.prototype_layer.class_P
    assert state.projection is not None
    source_P = state.projection.image_P if config.train.tie else None
    started = time.monotonic()
    views = last_layer_images(course.train, config)
    with (
        display.task("scores of the training images") as advance,
        cached_scores(model, views, source_P, course.run / layout.SCORES, advance) as score_NP,
    ):
        solution = solve_last_layer(
            score_NP,
            views.label_N,
            class_P,
            model.num_classes,
            lam=config.train.l1,
            **terms_of(config.train),
            weight_N=of_views(course.weight_N, config.train.last_layer_views),
            start_KP=unsolved_KP,
        )
    with torch.no_grad():
        model.last_layer.weight.copy_(solution.weight_KP)
    kept_NP, state.val_score_NP = state.val_score_NP, None
    val_NK = classify_images(model, val) if kept_NP is None else logits_of_kept(kept_NP, model.last_layer.weight)
    measured = measure(val_NK, val.label_N)
    record: dict[str, Any] = {
        **asdict(entry),
        "objective": solution.objective,
        "kkt_residual": solution.kkt_residual,
        "iterations": solution.iterations,
        "nonzero_negative": solution.nonzero_negative,
        "train": {"accuracy": solution.accuracy},
        "val": measured,
    }
    state.metrics.append({**record, "seconds": time.monotonic() - started})
    chosen_by = _accuracy_to_choose_by(val_NK, course, measured["accuracy"])
    if chosen_by >= state.best_accuracy:
        state.best_accuracy = chosen_by
        state.best_model, state.best_projection = copy_state(model), state.projection
        state.best_unsolved_KP, state.best_val_NK = unsolved_KP, val_NK
    display.line(
        f"last layer: objective {solution.objective:.5f} (optimality residual {solution.kkt_residual:.0e}), "
        f"{solution.nonzero_negative} connections to other classes, validation accuracy {measured['accuracy']:.1%}"
    )


def _accuracy_to_choose_by(val_NK: Tensor, course: Course, accuracy: float) -> float:
    """Return the validation accuracy, or its mean over the classes where they are to count alike."""
    if not course.config.train.balance or not len(course.val):
        return accuracy
    guess_N, label_N = val_NK.argmax(1), course.val.label_N
    return float(torch.stack([(guess_N == label_N)[label_N == k].float().mean() for k in label_N.unique()]).mean())


def teach_itself(state: RunState, entry: PlanEntry, course: Course) -> None:
    """Keep the classifier as it is now: its probabilities are part of what it learns from here on."""
    state.make_teacher()
    course.display.line("the baseline goes on, and is taught by what it says so far")


def keep_classifier(state: RunState, entry: PlanEntry, course: Course) -> None:
    """Keep the classifier if it validates best so far, as a ProtoPNet is kept after each cycle."""
    assert isinstance(state.model, BaselineClassifier)
    started = time.monotonic()
    measured = measure(classify_images(state.model, course.val), course.val.label_N)
    state.metrics.append({**asdict(entry), "val": measured, "seconds": time.monotonic() - started})
    if measured["accuracy"] >= state.best_accuracy:
        state.best_accuracy, state.best_model = measured["accuracy"], copy_state(state.model)


OTHER_STAGES = {
    "parts": find_parts_of_images,
    "choose": choose_prototypes,
    "project": project_prototypes,
    "last_layer": optimise_last_layer,
    "teach": teach_itself,
    "keep": keep_classifier,
}
