"""The data behind a run: found again where it was, or where the user says it is now."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

import torch

from likethat import run_dir
from likethat.classifier import Classifier, load
from likethat.data.dataset import PARTS, DataSet, Sample, fingerprint, open_dataset
from likethat.errors import UserError
from likethat.explaining.verify import Verification, verify
from likethat.metrics.accuracy import Evaluation, evaluate_logits, logits_of
from likethat.plain import PlainRun, load_plain
from likethat.progress import Display
from likethat.run_dir import RunRecord


def load_run(run: Path, device: str) -> Classifier | PlainRun:
    """A run of any kind."""
    is_plain = run_dir.read_record(run).kind == run_dir.BASELINE
    return load_plain(run, device) if is_plain else load(run, device)


def data_root(classifier: Classifier, data: str | None) -> Path:
    """The folder that the paths of a run's prototypes are relative to."""
    recorded = Path(run_dir.read_record(classifier.path).data.root)
    if data is None:
        if not recorded.is_dir():
            raise UserError(f"The data is no longer at {recorded}; say where it is with --data DATA.")
        return recorded
    return open_run_data(classifier, data).root


def open_run_data(classifier: Classifier | PlainRun, data: str | None) -> DataSet:
    """The data set as the run saw it, same split and files, or other data with the same classes."""
    record = run_dir.read_record(classifier.path)
    if data is None:
        _check_same_split([run_dir.read_record(classifier.path / folder) for folder in record.member_folders()])
    return with_labels_of(classifier.classes, _open(record, data), set(record.data.skipped))


def _check_same_split(members: Sequence[RunRecord]) -> None:
    """What one network of a combined run was trained on must not be what another is tested on."""
    if len({record.data.fingerprint for record in members}) == 1:
        return
    # The fingerprint also tells the order of the classes, which may differ.
    splits = []
    for record in members:
        dataset, skipped = _open(record, None), set(record.data.skipped)
        splits.append([{sample.path for sample in dataset.part(part)} - skipped for part in PARTS])
    if any(split != splits[0] for split in splits):
        raise UserError(
            "The combined runs were trained on different images, so none of their test images are new to all of them; "
            "name images that are with --data DATA."
        )


def _open(record: RunRecord, data: str | None) -> DataSet:
    config = record.config
    if data is None and not Path(record.data.root).is_dir():
        raise UserError(f"The data is no longer at {record.data.root}; say where it is with --data DATA.")
    return open_dataset(
        data or record.data.root,
        seed=config.train.seed,
        full_images=config.data.full_images,
        val_fraction=config.data.val_fraction,
        test_fraction=config.data.test_fraction,
    )


def with_labels_of(classes: tuple[str, ...], dataset: DataSet, skipped: Set[str] = frozenset()) -> DataSet:
    """The same images less the skipped ones, labelled by the run's numbering of the classes."""
    unknown = sorted(set(dataset.classes) - set(classes))
    if unknown:
        raise UserError(
            f"{dataset.root} has classes that the run does not know: {', '.join(unknown[:5])}"
            f"{' and others' if len(unknown) > 5 else ''}; evaluate on the classes it was trained on."
        )
    number = {name: label for label, name in enumerate(classes)}

    def relabel(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
        kept = (sample for sample in samples if sample.path not in skipped)
        return tuple(replace(sample, label=number[dataset.classes[sample.label]]) for sample in kept)

    return replace(
        dataset,
        classes=classes,
        train=relabel(dataset.train),
        val=relabel(dataset.val),
        test=relabel(dataset.test),
    )


def is_training_data(classifier: Classifier | PlainRun, dataset: DataSet) -> bool:
    """Whether `dataset` holds the images the run was trained on, judged by the source of its first prototype; of a
    plain classifier, by all of them."""
    if isinstance(classifier, PlainRun):
        hashes = {
            s.path: hashlib.sha256((dataset.root / s.path).read_bytes()).hexdigest() for s in dataset.all_samples()
        }
        return fingerprint(dataset, hashes) == run_dir.read_record(classifier.path).data.fingerprint
    first = classifier.prototypes[0]
    path = dataset.root / first.path
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == first.sha256


def open_test_data(classifier: Classifier | PlainRun, data: str | None) -> tuple[DataSet, str]:
    """A data set whose test part is what to evaluate on, and what that is called: of other data without a test part,
    all of it."""
    dataset = open_run_data(classifier, data)
    if "test" in dataset.held_out and not is_training_data(classifier, dataset):
        return replace(dataset, test=dataset.all_samples()), "all"
    return dataset, "test"


def evaluate_run(classifier: Classifier | PlainRun, data: str | None, display: Display) -> Evaluation:
    dataset, part = open_test_data(classifier, data)
    logits_NK = logits_of(classifier, dataset.root, dataset.test, display)
    label_N = torch.tensor([sample.label for sample in dataset.test], device=logits_NK.device)
    return evaluate_logits(logits_NK, label_N, classifier.classes, part)


def verify_run(classifier: Classifier, data: str | None, display: Display) -> Verification:
    with display.task("verifying") as advance:
        return verify(classifier, data_root(classifier, data), advance)
