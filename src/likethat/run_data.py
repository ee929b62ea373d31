"""The data behind a run: found again where it was, or where the user says it is now."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import torch

from likethat import run_dir
from likethat.classifier import Classifier
from likethat.data.dataset import DataSet, Sample, open_dataset
from likethat.errors import UserError
from likethat.explain.verify import Verification, verify
from likethat.metrics.accuracy import Evaluation, evaluate_logits, logits_of
from likethat.progress import Display


def data_root(classifier: Classifier, data: str | None) -> Path:
    """The folder that the paths of a run's prototypes are relative to."""
    recorded = Path(run_dir.read_record(classifier.path).data.root)
    if data is None:
        if not recorded.is_dir():
            raise UserError(f"The data is no longer at {recorded}; say where it is with --data DATA.")
        return recorded
    return open_run_data(classifier, data).root


def open_run_data(classifier: Classifier, data: str | None) -> DataSet:
    """The data set as the run saw it, same split and files, or other data with the same classes."""
    record = run_dir.read_record(classifier.path)
    config = record.config
    if data is None and not Path(record.data.root).is_dir():
        raise UserError(f"The data is no longer at {record.data.root}; say where it is with --data DATA.")
    dataset = open_dataset(
        data or record.data.root,
        seed=config.train.seed,
        full_images=config.data.full_images,
        val_fraction=config.data.val_fraction,
        test_fraction=config.data.test_fraction,
    )
    skipped = set(record.data.skipped)
    return _with_labels_of(classifier, dataset, skipped)


def _with_labels_of(classifier: Classifier, dataset: DataSet, skipped: set[str]) -> DataSet:
    """The same images less the skipped ones, labelled by the run's numbering of the classes."""
    unknown = sorted(set(dataset.classes) - set(classifier.classes))
    if unknown:
        raise UserError(
            f"{dataset.root} has classes that the run does not know: {', '.join(unknown[:5])}"
            f"{' and others' if len(unknown) > 5 else ''}; evaluate on the classes it was trained on."
        )
    number = {name: label for label, name in enumerate(classifier.classes)}

    def relabel(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
        kept = (sample for sample in samples if sample.path not in skipped)
        return tuple(replace(sample, label=number[dataset.classes[sample.label]]) for sample in kept)

    return replace(
        dataset,
        classes=classifier.classes,
        train=relabel(dataset.train),
        val=relabel(dataset.val),
        test=relabel(dataset.test),
    )


def is_training_data(classifier: Classifier, dataset: DataSet) -> bool:
    """Whether `dataset` holds the images the run was trained on, judged by the source of its first prototype."""
    first = classifier.prototypes[0]
    path = dataset.root / first.path
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == first.sha256


def evaluate_run(classifier: Classifier, data: str | None, display: Display) -> Evaluation:
    """On the test images; of other data without a test part, on all of it."""
    dataset = open_run_data(classifier, data)
    part, samples = "test", dataset.test
    if "test" in dataset.held_out and not is_training_data(classifier, dataset):
        part, samples = "all", dataset.all_samples()
    logits_NK = logits_of(classifier, dataset.root, samples, display)
    label_N = torch.tensor([sample.label for sample in samples], device=logits_NK.device)
    return evaluate_logits(logits_NK, label_N, classifier.classes, part)


def verify_run(classifier: Classifier, data: str | None, display: Display) -> Verification:
    with display.task("verifying") as advance:
        return verify(classifier, data_root(classifier, data), advance)
