"""What `likethat verify` does: digests first, then everything that follows from other things."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from likethat.data.dataset import DataSet, Sample
from likethat.errors import UserError
from likethat.explaining.draw.render import read_picture
from likethat.explaining.gallery import draw_prototypes
from likethat.explaining.verify import FAILED, MOST_CHANGE, NOT_PROVEN, PROVEN, BoxProof, Finding, Verification, verify
from likethat.metrics.accuracy import logits_of
from likethat.progress import Display
from likethat.runs import layout
from likethat.runs.calibration import fit_calibration
from likethat.runs.classifier import Classifier, Prototype, load
from likethat.runs.data import data_roots, member_datasets, open_validation_data
from likethat.runs.manifest import compare_with_manifest
from likethat.training.project import Projection
from likethat.workflows.derived import rebuild

SHOWN = 5  # names in a sentence
DRAWN = 16  # prototypes of a network whose boxes and pictures are drawn again
BOX_SHARE = 0.25  # of a cell of the latent map: what rounding on another machine may move a box by
SOURCE_SHARE = 0.04  # of a small picture's side: the same
PICTURE_LEVELS = 12.0  # of 255, on average: what other versions of the JPEG library may change
CALIBRATION_SHARE = 0.01  # what scores in half precision may change, of a probability or of the largest points


def verify_folder(run: Path, data: str | None, device: str, display: Display) -> Verification:
    """Verify a run folder that may have been changed so that it does not even load."""
    try:
        classifier = load(run, device)
    except UserError as error:
        files = check_files(run)
        if files.result != FAILED:
            raise
        return Verification(0, 0, 0.0, (), findings=(files, Finding("model", FAILED, str(error))))
    return verify_run(classifier, data, display)


def verify_run(classifier: Classifier, data: str | None, display: Display) -> Verification:
    """Verify a run that is loaded: number, class and order of its prototypes fit model and config.json."""
    files, roots = check_files(classifier.path), data_roots(classifier, data)
    with display.task("verifying") as advance:
        verification = verify(classifier, roots, advance)
    bad = {failure.prototype for failure in verification.failures}
    good = [prototype for prototype in classifier.prototypes if prototype.id not in bad]
    fits = f"{len(classifier.prototypes)} prototypes in number, class and order, and a model of finite numbers"
    findings = (
        files,
        Finding("structure", PROVEN, f"{layout.CONFIG}, {layout.PROTOTYPES} and {layout.MODEL} fit: {fits}"),
        *([check_boxes(verification.boxes)] if verification.boxes else []),
        _unless_refused("sources", lambda: check_sources(classifier, member_datasets(classifier, data))),
        _unless_refused("pictures", lambda: check_pictures(classifier, good, roots)),
        _unless_refused("calibration", lambda: check_calibration(classifier, data, display)),
    )
    return replace(verification, findings=findings)


def _unless_refused(what: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except UserError as error:
        return Finding(what, NOT_PROVEN, str(error))


def check_files(run: Path) -> Finding:
    """Compare every file with its digest, those of members too."""
    count, different = 0, []
    for folder in (run, *sorted((run / layout.MEMBERS).glob("*"))):
        if (compared := compare_with_manifest(folder)) is None:
            why = f"{folder} has no {layout.MANIFEST}: it was made by an earlier version, or that file was removed"
            return Finding("files", NOT_PROVEN, why)
        count += compared[0]
        different += [f"{folder / name}" for name in compared[1]]
    if different:
        return Finding("files", FAILED, f"not as they were written: {_listed(different)}")
    why = f"{count} files have the digests they were written with; who forges files can forge these too"
    return Finding("files", PROVEN, why)


def check_boxes(proof: BoxProof) -> Finding:
    """Tell what came of replacing everything outside the boxes of a network that sees windows."""
    if not proof.pictures:
        return Finding("boxes", NOT_PROVEN, "no training picture can be read to replace what lies outside them")
    why = (
        f"everything outside the boxes replaced by other pictures, {proof.prototypes} prototypes in {proof.pictures} "
        f"pictures: similarities change by at most {proof.max_change:.1e}"
        f"{' (equal to the last bit)' if proof.max_change == 0 else ''}"
    )
    return Finding("boxes", PROVEN if proof.max_change <= MOST_CHANGE else FAILED, why)


def check_sources(classifier: Classifier, datasets: Sequence[DataSet]) -> Finding:
    """Look whether every prototype comes from a training image of its own class, cropped as the data set says."""
    wrong, unknown = [], []
    for member, dataset in enumerate(datasets):
        samples = {sample.path: sample for sample in dataset.all_samples()}
        training = {sample.path for sample in dataset.train}
        for prototype in (own for own in classifier.prototypes if own.member == member):
            sample = samples.get(prototype.path)
            if sample is not None and (sample.label, sample.box) != (prototype.label, prototype.crop_to):
                wrong.append(f"prototype {prototype.id} ({prototype.path} of {dataset.classes[sample.label]})")
            elif sample is None or sample.path not in training:
                unknown.append(prototype.path)
    if wrong:
        return Finding("sources", FAILED, f"not of the class or crop that they say: {_listed(wrong)}")
    if unknown:
        why = f"not among the training images, as when images were added or removed: {_listed(unknown)}"
        return Finding("sources", NOT_PROVEN, why)
    return Finding("sources", PROVEN, "every prototype comes from a training image of its class")


def check_pictures(classifier: Classifier, good: Sequence[Prototype], roots: Sequence[Path]) -> Finding:
    """Draw boxes and pictures of some prototypes again, whose patches are proven, and compare them."""
    wrong, drawn = [], 0
    for member, root in enumerate(roots):
        own = [prototype for prototype in good if prototype.member == member]
        chosen = [own[round(place)] for place in np.linspace(0, len(own) - 1, min(DRAWN, len(own)))]
        drawn += len(chosen)
        with tempfile.TemporaryDirectory(prefix="likethat-verify-") as scratch:
            for prototype, fresh in zip(chosen, _draw(classifier, chosen, root, Path(scratch)), strict=True):
                if what := _difference(classifier.path, prototype, Path(scratch), fresh):
                    wrong.append(f"prototype {prototype.id} ({what})")
    if wrong:
        return Finding("pictures", FAILED, f"drawn again, they look different: {_listed(wrong)}")
    why = f"boxes and pictures of {drawn} of {len(classifier.prototypes)} prototypes were drawn again and are the same"
    return Finding("pictures", PROVEN if drawn else NOT_PROVEN, why)


def _draw(classifier: Classifier, chosen: Sequence[Prototype], root: Path, scratch: Path) -> list[Prototype]:
    """Return the facts about some prototypes of one network as training would find them, with pictures in `scratch`."""
    if not chosen:
        return []
    member = chosen[0].member
    network = classifier.networks[member]
    first = next(number for number, own in enumerate(classifier.prototypes) if own.member == member)
    number_p = torch.tensor([prototype.id - first for prototype in chosen])
    layer = network.prototype_layer
    some = layer.with_prototypes(layer.prototype_PDhw.flatten(1)[number_p], layer.class_P[number_p])
    folder = layout.read_record(classifier.path).member_folders()[member]
    config = layout.read_record(classifier.path / folder).config.model
    model = rebuild(network, config, some, torch.zeros(len(classifier.classes), len(chosen)).to(classifier.device))
    columns = [[p.row for p in chosen], [p.column for p in chosen], [p.moved for p in chosen]]
    projection = Projection(torch.arange(len(chosen)), *map(torch.tensor, columns))
    samples = [Sample(p.path, p.label, p.crop_to, value_range=classifier.value_range) for p in chosen]
    sha256 = {prototype.path: prototype.sha256 for prototype in chosen}
    return draw_prototypes(scratch, model, projection, samples, root, sha256, classifier.classes)


def _difference(run: Path, said: Prototype, scratch: Path, fresh: Prototype) -> str:
    """Return what of a prototype is not as it was drawn again; nothing where all is."""
    x0, y0, x1, y1 = fresh.cell
    limit = BOX_SHARE * max(x1 - x0, y1 - y0)
    if max(_largest(said.cell, fresh.cell), _largest(said.box, fresh.box)) > limit:
        return "its box"
    if _largest(said.source_box, fresh.source_box) > SOURCE_SHARE * max(read_picture(scratch, fresh.source).size):
        return "its box in the small picture"
    for name, theirs, ours in (("crop", said.crop, fresh.crop), ("source", said.source, fresh.source)):
        picture = read_picture(scratch, ours).convert("RGB")
        other = read_picture(run, theirs).convert("RGB").resize(picture.size, Image.Resampling.BILINEAR)
        if np.abs(np.asarray(picture, float) - np.asarray(other, float)).mean() > PICTURE_LEVELS:
            return f"its {name} picture"
    return ""


def check_calibration(classifier: Classifier, data: str | None, display: Display) -> Finding:
    """Compute it again from the run's validation images."""
    said = classifier.calibration
    if said is None:
        return Finding("calibration", NOT_PROVEN, "the run has none")
    if said.other_images:
        return Finding("calibration", NOT_PROVEN, "it was made from other images than the run's validation images")
    dataset = open_validation_data(classifier, data)
    if len(dataset.val) != len(said.likeness):
        why = f"it is of {len(said.likeness)} images, and the data has {len(dataset.val)} for validation"
        return Finding("calibration", NOT_PROVEN, why)
    logits_NK = logits_of(classifier, dataset.root, dataset.val, display)
    found = fit_calibration(logits_NK, torch.tensor([sample.label for sample in dataset.val]))
    off = _largest(said.nonconformity, found.nonconformity)
    points = _largest(said.likeness, found.likeness) / max(1.0, *map(abs, found.likeness))
    why = f"computed again from {len(dataset.val)} validation images it differs by {max(off, points):.1e}"
    return Finding("calibration", PROVEN if max(off, points) <= CALIBRATION_SHARE else FAILED, why)


def _largest(said: Sequence[float], found: Sequence[float]) -> float:
    return float(np.abs(np.subtract(said, found)).max())


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
