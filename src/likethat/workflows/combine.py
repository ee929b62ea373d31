"""Several runs over the same classes as one, whose logits are the sum of theirs: what `likethat combine` does."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from likethat.data.dataset import DataSet
from likethat.data.folder_kinds import CHECKPOINTS, LOCK, is_run
from likethat.errors import UserError
from likethat.inference.passes import accuracy
from likethat.metrics.accuracy import logits_of
from likethat.progress import Display
from likethat.report.html import write_report
from likethat.runs import layout
from likethat.runs.atomic_files import whole_folder
from likethat.runs.classifier import Classifier, load
from likethat.runs.data import is_training_data, open_test_data, open_validation_data
from likethat.runs.layout import RunRecord
from likethat.runs.looks import count_looks
from likethat.runs.manifest import write_manifest
from likethat.runs.prototypes import read_own_prototypes
from likethat.training.state import write_metrics
from likethat.workflows.derived import write_combined, write_network
from likethat.workflows.run_conclusion import conclude


@dataclass(frozen=True)
class Part:
    """A network that becomes a member: its own run folder, which may itself be a member's."""

    path: Path
    record: RunRecord


def combine(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    data: str | None = None,
    device: str = "auto",
    overwrite: bool = False,
    display: Display | None = None,
) -> dict[str, Any]:
    """Write the run whose logits are the sums of the runs'. Members of combined runs are taken one by one."""
    display, out = display or Display(quiet=True), Path(out)
    parts = _parts([Path(run) for run in runs], device)
    if len(parts) < 2:
        raise UserError("Combining takes at least two networks; name two runs or more.")
    if any(out.resolve().is_relative_to(part.path.resolve()) for part in parts):
        raise UserError(f"{out} lies inside a run that is to be combined; choose another --out.")
    _check_alike(parts)
    with whole_folder(out, is_run, overwrite=overwrite) as target:
        for number, part in enumerate(parts):
            _copy_member(part, parts[0].record.data.classes, target / layout.MEMBERS / str(number))
        folders = [f"{layout.MEMBERS}/{number}" for number in range(len(parts))]
        write_combined(target, [layout.read_record(target / folder) for folder in folders])
        return _evaluate(target, [load(target / folder, device) for folder in folders], parts, data, display)


def _parts(runs: Sequence[Path], device: str) -> list[Part]:
    parts = []
    for run in runs:
        load(run, device)  # says what is wrong with a run that is unfinished, damaged or a baseline
        folders = layout.read_record(run).member_folders()
        parts += [Part(run / folder, layout.read_record(run / folder)) for folder in folders]
    return parts


def _check_alike(parts: Sequence[Part]) -> None:
    """Refuse runs with other classes by name, or other crops: an explanation shows one picture for all members."""
    first = parts[0]
    for part in parts[1:]:
        only_first = sorted(set(first.record.data.classes) - set(part.record.data.classes))
        only_here = sorted(set(part.record.data.classes) - set(first.record.data.classes))
        if only_first or only_here:
            differences = [
                f"only {path} knows {', '.join(names[:5])}{' and others' if len(names) > 5 else ''}"
                for path, names in ((first.path, only_first), (part.path, only_here))
                if names
            ]
            raise UserError(f"Runs of different classes cannot be combined: {' and '.join(differences)}.")
        if len({p.record.config.data.value_range for p in (first, part)}) > 1:
            raise UserError(
                f"{first.path} and {part.path} were trained with different --value-range; combine runs that read "
                "values alike."
            )
        cropped = {any(own.crop_to for own in read_own_prototypes(p.path, p.record)) for p in (first, part)}
        if len(cropped) > 1:
            raise UserError(
                f"One of {first.path} and {part.path} was trained on whole pictures and the other on cropped ones; "
                "combine runs that were trained alike."
            )


def _copy_member(part: Part, classes: tuple[str, ...], target: Path) -> None:
    """Make a copy without checkpoints and measurements, its prototypes and connections in the order of `classes`."""
    ignore = shutil.ignore_patterns(CHECKPOINTS, LOCK, *layout.INTERPRETABILITY.values())
    try:
        shutil.copytree(part.path, target, ignore=ignore)
    except (OSError, shutil.Error) as error:
        raise UserError(f"{part.path} could not be copied to {target} ({error}); make room and try again.") from error
    if part.record.data.classes != classes:
        _reorder(part, classes, target)
    write_manifest(target)


def _reorder(part: Part, classes: tuple[str, ...], target: Path) -> None:
    """Write the copy's prototypes and connections anew, in the order of `classes`."""
    classifier = load(target, "cpu")
    network = classifier.networks[0]
    new_of_old_K = torch.tensor([classes.index(name) for name in part.record.data.classes])
    class_P = new_of_old_K[network.prototype_layer.class_P]
    keep_p = class_P.argsort(stable=True)
    weight_KP = torch.empty_like(classifier.weight_KP)
    weight_KP[new_of_old_K] = classifier.weight_KP
    shutil.rmtree(target / layout.PICTURES)
    record = replace(part.record, data=replace(part.record.data, classes=classes))
    prototypes = classifier.prototypes
    write_network(target, record, network, keep_p, class_P[keep_p], weight_KP[:, keep_p], prototypes, part.path)
    write_report(target, load(target, "cpu"), [])  # the old pages name the prototypes otherwise
    (target / layout.CONFUSIONS).unlink(missing_ok=True)


def _evaluate(
    run: Path, members: Sequence[Classifier], parts: Sequence[Part], data: str | None, display: Display
) -> dict[str, Any]:
    """Evaluate each member and the sum on the test images; without them, the run is complete but for its accuracy."""
    combined = load(run, str(members[0].device))
    lines: list[dict[str, Any]] = [
        {
            "run": str(part.path),
            "backbone": part.record.config.model.backbone,
            "input_size": list(part.record.config.model.input_size),
            "prototypes": sum(part.record.prototypes_of_class),
        }
        for part in parts
    ]
    document: dict[str, Any] = {"stage": "combine", "members": lines}
    try:
        dataset, _ = open_test_data(combined, data)
    except UserError as error:
        if data is not None:
            raise
        display.line(f"combined without measuring the accuracy: {error}")
        write_metrics(run, [document])
        write_report(run, combined, [])
        write_manifest(run)
        return document
    label_N = torch.tensor([sample.label for sample in dataset.test])
    logits = []
    for line, member in zip(lines, members, strict=True):
        logits.append(logits_of(member, dataset.root, dataset.test, display))
        line["accuracy"] = accuracy(logits[-1].cpu(), label_N)
    val_NK = _validation_logits(combined, dataset, data, display)
    looks = max(count_looks(layout.read_metrics(member.path)) for member in members)
    evaluation = conclude(run, [document], dataset, torch.stack(logits).sum(0), val_NK, looks)
    return {**document, "test": evaluation.to_dict()}


def _validation_logits(combined: Classifier, dataset: DataSet, data: str | None, display: Display) -> Tensor | None:
    """Return the logits of the runs' common validation images; None where the data is another one, or one network's
    validation images are another's training images."""
    if not is_training_data(combined, dataset):
        return None
    try:
        validation = open_validation_data(combined, data)
    except UserError as error:
        display.line(f"combined without calibration: {error}")
        return None
    return logits_of(combined, validation.root, validation.val, display)
