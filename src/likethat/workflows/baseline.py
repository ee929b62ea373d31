"""The counterpart that does not explain itself, trained on the same images: what `likethat baseline` does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from likethat.config import Config, resolve
from likethat.data.loaders import image_weights
from likethat.distributed import barrier, is_main_process
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
from likethat.runs.baseline import LoadedBaseline, load_baseline
from likethat.runs.lock import lock_run
from likethat.runs.manifest import write_manifest
from likethat.runtime import exact_arithmetic, memory_shortage_told, resolve_device, seed_for, stop_on_signals
from likethat.training.course import Course
from likethat.training.loop import follow_plan
from likethat.training.plan import PlanEntry, make_plan
from likethat.training.state import RunState, write_metrics
from likethat.workflows.run_setup import begin, check_same_images, make_record, open_out, prepare


def train_baseline(
    data: str | Path,
    out: str | Path,
    *,
    preset: str = "default",
    config_file: Path | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    display: Display | None = None,
    **options: Any,
) -> LoadedBaseline:
    """Train the backbone with global average pooling and a linear layer; keep the model of the last epoch.

    With the same data and options it is, to the bit, the baseline that `likethat train` takes its patches from.
    """
    out, display = Path(out), display or Display(quiet=True)
    torch_device = resolve_device(device)
    exact_arithmetic()
    config = resolve(preset, config_file, **options)
    plan = [entry for entry in make_plan(config.train) if entry.stage == "baseline"]
    if not plan:
        raise UserError(
            "The baseline stage has no epochs here, so there is nothing to train; use the default preset or "
            "pass --baseline-epochs above 0."
        )
    with lock_run(out):
        saved = open_out(out, config, layout.BASELINE, resume=resume, overwrite=overwrite)
        if saved is not None and layout.is_finished(out):
            display.line(f"{out} is finished already.")
        else:
            _train(Path(data), out, config, plan, saved, torch_device, display)
    return load_baseline(out, device)


def _train(
    data: Path,
    out: Path,
    config: Config,
    plan: list[PlanEntry],
    saved: layout.RunRecord | None,
    torch_device: torch.device,
    display: Display,
) -> None:
    """Train into a folder that is held and may be written to; `saved` is the record of a run that goes on."""
    with memory_shortage_told(), stop_on_signals() as stop:
        prepared = prepare(data, out, config, torch_device, display, stop)
        classes = prepared.dataset.classes
        record = replace(make_record(prepared, []), kind=layout.BASELINE)
        check_same_images(saved, record, out)
        torch.manual_seed(seed_for(config.train.seed, "weights"))
        model = place(create_baseline(config.model, len(classes)), torch_device)
        begin(out, record, saved)
        state = RunState(None, model)
        train_images, val_images, test = (prepared.images[part] for part in ("train", "val", "test"))
        fingerprint = record.data.fingerprint
        weight_N = image_weights(prepared.dataset.train, balance=config.train.balance)
        told = (display, stop, None, weight_N)
        follow_plan(plan, state, Course(train_images, val_images, classes, config, out, fingerprint, *told))
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
