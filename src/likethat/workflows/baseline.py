"""The counterpart that does not explain itself, trained on the same images: what `likethat baseline` does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from likethat.config.presets import resolve
from likethat.config.settings import Config
from likethat.data.loaders import image_weights
from likethat.distributed import barrier, broadcast_model, is_main_process
from likethat.errors import UserError
from likethat.inference.passes import classify_images
from likethat.metrics.accuracy import evaluate_logits
from likethat.models.backbone import place
from likethat.models.baseline import create_baseline
from likethat.progress import Display
from likethat.report.html import write_baseline_report
from likethat.report.near_duplicates import write_pairs
from likethat.runs import layout
from likethat.runs.atomic_files import save_tensors
from likethat.runs.baseline import LoadedBaseline, check_baseline, load_baseline, read_baseline
from likethat.runs.lock import lock_run
from likethat.runs.manifest import write_manifest
from likethat.runtime import exact_arithmetic, memory_shortage_told, resolve_device, seed_for, stop_on_signals
from likethat.training.course import Course
from likethat.training.loop import follow_plan
from likethat.training.plan import PlanEntry, make_counterpart_plan, make_plan
from likethat.training.state import RunState, write_metrics
from likethat.workflows.run_setup import (
    baseline_to_read,
    begin,
    check_same_images,
    make_record,
    open_out,
    prepare,
    with_weights,
)


def train_baseline(
    data: str | Path,
    out: str | Path,
    *,
    preset: str = "default",
    config_file: Path | None = None,
    device: str = "auto",
    as_long: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    display: Display | None = None,
    **options: Any,
) -> LoadedBaseline:
    """Train the backbone with global average pooling and a linear layer; keep the model of the last epoch.

    With the same data and options it is, to the bit, the baseline that `likethat train` takes its patches from. With
    `as_long` it goes on through all stages of the preset, with the views, targets and epochs of a ProtoPNet. It is kept
    as one is: of several cycles the one with the best validation accuracy.
    """
    out, display = Path(out), display or Display(quiet=True)
    torch_device = resolve_device(device)
    exact_arithmetic()
    config = resolve(preset, config_file, **options)
    plan = make_counterpart_plan(config.train) if as_long else make_plan(config.train)
    plan = [entry for entry in plan if as_long or entry.stage == "baseline"]
    if not any(entry.is_epoch for entry in plan):
        raise UserError(
            "There are no epochs here, so there is nothing to train; use the default preset or pass --baseline-epochs "
            "above 0 (with --as-long, --joint-epochs will do)."
        )
    with lock_run(out):
        saved = open_out(out, config, layout.BASELINE, resume=resume, overwrite=overwrite)
        if saved is not None and saved.as_long != as_long:
            how = "with" if saved.as_long else "without"
            raise UserError(f"The baseline in {out} was begun {how} --as-long; resume it so, or choose another --out.")
        if saved is not None and layout.is_finished(out):
            display.line(f"{out} is finished already.")
        else:
            _train(Path(data), out, config, plan, saved, torch_device, display, as_long=as_long)
    return load_baseline(out, device)


def _train(
    data: Path,
    out: Path,
    config: Config,
    plan: list[PlanEntry],
    saved: layout.RunRecord | None,
    torch_device: torch.device,
    display: Display,
    *,
    as_long: bool,
) -> None:
    """Train into a folder that is held and may be written to; `saved` is the record of a run that goes on."""
    config, source = baseline_to_read(config, saved, out)
    if source:
        check_baseline(Path(source), config.model, display)
    with memory_shortage_told(), stop_on_signals() as stop:
        prepared = prepare(data, out, config, torch_device, display, stop)
        classes = prepared.dataset.classes
        record = replace(make_record(prepared, []), kind=layout.BASELINE, as_long=as_long)
        check_same_images(saved, record, out)
        torch.manual_seed(seed_for(config.train.seed, "weights"))
        weights = "none" if config.train.from_baseline else config.model.weights
        model = place(create_baseline(config.model, len(classes), weights=weights), torch_device)
        if source:
            read_baseline(model, Path(source), record)
        begin(out, with_weights(record, model.backbone, saved, out), saved)
        state = RunState(model if as_long else None, model if config.train.has_baseline else None)
        train_images, val_images, test = (prepared.images[part] for part in ("train", "val", "test"))
        fingerprint = record.data.fingerprint
        weight_N = image_weights(prepared.dataset.train, balance=config.train.balance)
        told = (display, stop, None, weight_N)
        follow_plan(plan, state, Course(train_images, val_images, classes, config, out, fingerprint, *told))
        if as_long:
            model.load_state_dict(state.best_model)
            broadcast_model(model)
        with display.task("test images") as advance:
            logits_NK = classify_images(model, test, advance)
        evaluation = evaluate_logits(logits_NK, test.label_N, classes, "test")
        if is_main_process():
            save_tensors(out / layout.MODEL, model.state_dict())
            write_metrics(out, [*state.metrics, {"stage": "test", **evaluation.to_dict()}])
            write_pairs(out / layout.NEAR_DUPLICATES, prepared.dataset, prepared.near_duplicates)
            write_baseline_report(out, config.model.backbone, classes)
            write_manifest(out)
            layout.drop_checkpoints(out)
        barrier()
    display.line(f"test accuracy {evaluation.accuracy:.1%} on {evaluation.images} images")
