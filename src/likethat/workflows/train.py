"""From images to a finished run folder: what `likethat train` and `likethat.train` do."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from likethat.config.presets import resolve
from likethat.config.settings import AUTO_WIDTH, Config
from likethat.data.formats import stated_range
from likethat.data.loaders import image_weights
from likethat.distributed import barrier, is_main_process
from likethat.errors import UserError
from likethat.explaining.gallery import begin_drawing, in_order, save_prototypes
from likethat.inference.passes import classify_images, latents_of, logits_by, measure, own_batches_of
from likethat.models.backbone import place
from likethat.models.baseline import BaselineClassifier
from likethat.models.protopnet import ProtoPNet, create_protopnet
from likethat.progress import Display
from likethat.report.near_duplicates import write_pairs
from likethat.runs import layout
from likethat.runs.atomic_files import save_tensors
from likethat.runs.baseline import check_baseline, read_baseline
from likethat.runs.classifier import Classifier, load
from likethat.runs.layout import RunRecord
from likethat.runs.lock import lock_run
from likethat.runtime import exact_arithmetic, memory_shortage_told, resolve_device, seed_for, stop_on_signals
from likethat.training.course import Course
from likethat.training.loop import fit
from likethat.training.state import RunState
from likethat.training.tensorboard import tensorboard_observer
from likethat.workflows.objects import object_cells
from likethat.workflows.run_conclusion import conclude
from likethat.workflows.run_setup import (
    PreparedRun,
    baseline_to_read,
    begin,
    check_same_images,
    make_record,
    open_out,
    prepare,
    prototypes_by_class,
    with_weights,
)

PICTURES = "pictures of prototypes"
COARSE = 7  # rows and columns of a map, below which boxes hold much besides the part


def train(
    data: str | Path,
    out: str | Path,
    *,
    preset: str = "default",
    config_file: Path | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    tensorboard: bool = False,
    display: Display | None = None,
    **options: Any,
) -> Classifier:
    """Train on an image folder, a table, CUB_200_2011 or Stanford Cars, and leave a finished run folder at `out`.

    `options` are the names that `likethat train --help` lists, such as backbone="resnet34".
    """
    out, display = Path(out), display or Display(quiet=True)
    torch_device = resolve_device(device)
    exact_arithmetic()
    config = resolve(preset, config_file, **options)
    with lock_run(out):
        saved = open_out(out, config, layout.PROTOPNET, resume=resume, overwrite=overwrite)
        if saved is not None and layout.is_finished(out):
            display.line(f"{out} is finished already.")
            return load(out, device)
        return _train(Path(data), out, config, saved, torch_device, display, tensorboard=tensorboard)


def _train(
    data: Path,
    out: Path,
    config: Config,
    saved: RunRecord | None,
    torch_device: torch.device,
    display: Display,
    *,
    tensorboard: bool,
) -> Classifier:
    """Train into a folder that is held and may be written to; `saved` is the record of a run that goes on."""
    config, source = baseline_to_read(config, saved, out)
    if source:
        check_baseline(Path(source), config.model, display)
    with memory_shortage_told(), stop_on_signals() as stop:
        prepared = prepare(data, out, config, torch_device, display, stop)
        record = make_record(prepared, prototypes_by_class(config.model, prepared.dataset))
        check_same_images(saved, record, out)
        torch.manual_seed(seed_for(config.train.seed, "weights"))
        weights = "none" if config.train.from_baseline else config.model.weights
        model = place(create_protopnet(config.model, list(record.prototypes_of_class), weights=weights), torch_device)
        baseline = None
        if config.train.has_baseline:
            baseline = BaselineClassifier(model.backbone, len(record.data.classes)).to(torch_device)
            if source:
                read_baseline(baseline, Path(source), record)
        record = with_weights(record, model.backbone, saved, out)
        begin(out, record, saved)
        _describe(prepared, model, torch_device, display)
        train_images, val_images = prepared.images["train"], prepared.images["val"]
        observe = tensorboard_observer(out) if tensorboard and is_main_process() else None
        classes = prepared.dataset.classes
        weight_N = image_weights(prepared.dataset.train, balance=config.train.balance)
        on_NHW, simple = None, (config.model.similarity, config.model.prototype_shape) == ("cosine", (1, 1))
        if config.train.on_mask and (not simple or model.backbone.windows is not None):
            raise UserError("--on-mask needs --similarity cosine, --prototype-shape 1,1 and no --windows.")
        if config.data.on_object or config.train.on_mask:
            with display.task("masks and boxes") as advance:
                on_NHW = object_cells(prepared.dataset, model.backbone.cells, advance).to(torch_device)
            shown = float(on_NHW.float().mean())
            display.line(f"masks and boxes of objects fill {shown:.0%} of the training images")
        told = (display, stop, observe, weight_N, on_NHW)
        course = Course(train_images, val_images, classes, config, out, record.data.fingerprint, *told)
        state = fit(model, baseline, course)
        if config.model.latent_width == AUTO_WIDTH and is_main_process():
            with_chosen_width(record, model).write(out)
        return finish(out, model, state, prepared, display)


def with_chosen_width(record: RunRecord, model: ProtoPNet) -> RunRecord:
    """Return the record with the chosen width, marked as the choice of the run itself."""
    settings = replace(record.config.model, latent_width=model.prototype_layer.prototype_PDhw.shape[1])
    return replace(record, config=replace(record.config, model=settings), automatic=("latent_width",))


def _describe(prepared: PreparedRun, model: ProtoPNet, device: torch.device, display: Display) -> None:
    counts = ", ".join(f"{len(images)} {part}" for part, images in prepared.images.items())
    height, width = model.backbone.map_size
    windows = model.backbone.windows
    of_windows = f" of windows ({windows.cost(model.backbone.input_size):.1f} times the pixels)" if windows else ""
    display.line(
        f"{len(prepared.dataset.classes)} classes, images: {counts}. {model.backbone.name} on {device}, "
        f"{height}x{width} map{of_windows}, {len(model.prototype_layer.class_P)} prototypes."
    )
    if min(height, width) < COARSE:
        display.line(
            f"Warning: a map of {height}x{width} is coarser than {COARSE}x{COARSE}, so that boxes are large and "
            "prototypes may show background; take a larger --input-size."
        )


def finish(out: Path, model: ProtoPNet, state: RunState, prepared: PreparedRun, display: Display) -> Classifier:
    """Write model, prototypes, test accuracy (looked at here for the first and only time) and report."""
    assert state.best_projection is not None
    dataset, train_images = prepared.dataset, prepared.images["train"]
    with ExitStack() as stack:
        if is_main_process():
            sources = (train_images, dataset.train, dataset.root, prepared.sha256, dataset.classes)
            with display.task(PICTURES):  # which are drawn while the network looks at the test images
                drawn = stack.enter_context(begin_drawing(out, model, state.best_projection, *sources))
        logits_NK, val_NK, metrics = judge_images(model, state, prepared, display)
        if not is_main_process():
            barrier()
            return load(out, str(train_images.device))
        save_tensors(out / layout.MODEL, model.state_dict())
        with display.task(PICTURES) as advance:
            prototypes = in_order(drawn, len(model.prototype_layer.class_P), advance)
            save_prototypes(out, prototypes)
    write_pairs(out / layout.NEAR_DUPLICATES, dataset, prepared.near_duplicates)
    value_range = stated_range(prepared.config)
    classifier = Classifier(out, dataset.classes, [model], prototypes, value_range=value_range)
    evaluation = conclude(out, metrics, dataset, logits_NK, val_NK, classifier=classifier)
    layout.drop_checkpoints(out)
    barrier()
    display.line(f"test accuracy {evaluation.accuracy:.1%} on {evaluation.images} images")
    return classifier


def judge_images(
    model: ProtoPNet, state: RunState, prepared: PreparedRun, display: Display
) -> tuple[Tensor, Tensor, list[dict[str, Any]]]:
    """Return the logits of the test and of the validation images, and the run's records with what projection did to the
    accuracy on test images."""
    test, layer = prepared.images["test"], model.prototype_layer
    heads = [(layer, model.last_layer.weight)]
    if state.best_unsolved_KP is not None:
        # For reading only: what projection and last layer did to the accuracy, which the run told on validation images.
        unsolved_KP = state.best_unsolved_KP.to(test.device)
        heads += [(layer.before_projection(), unsolved_KP), (layer, unsolved_KP)]
    with display.task("test images") as advance:
        latents = latents_of(model, own_batches_of(test, advance))
        logits_NK, *unsolved = logits_by(heads, latents, len(test), test.device)
    val_NK = classify_images(model, prepared.images["val"]) if state.best_val_NK is None else state.best_val_NK
    metrics = state.metrics
    if unsolved:
        measured = [measure(unsolved_NK, test.label_N) for unsolved_NK in unsolved]
        metrics = [*metrics, {"stage": "test_projection", "before": measured[0], "after": measured[1]}]
    return logits_NK, val_NK, metrics
