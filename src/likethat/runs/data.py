"""The data behind a run: found again where it was, or where the user says it is now."""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from likethat.data.dataset import IMAGES_OF, PARTS, DataSet, Sample, fingerprint
from likethat.data.formats import is_benchmark, open_by_config, stated_range
from likethat.data.pictures import find_pictures
from likethat.data.reading.pages import digest_picture, split_page
from likethat.data.tables.rows import is_table
from likethat.errors import UserError
from likethat.runs import layout
from likethat.runs.baseline import LoadedBaseline, load_baseline
from likethat.runs.classifier import Classifier, load
from likethat.runs.layout import RunRecord
from likethat.runtime import seed_for

MOST_OUT_OF_DISTRIBUTION = 1000  # other pictures that a run is measured against
OUT_OF_DISTRIBUTION_SEED = "strangers"  # another word would draw other pictures than older runs were measured against


def load_run(run: Path, device: str) -> Classifier | LoadedBaseline:
    """Load a run of any kind."""
    is_baseline = layout.read_record(run).kind == layout.BASELINE
    return load_baseline(run, device) if is_baseline else load(run, device)


def data_roots(classifier: Classifier, data: str | None) -> list[Path]:
    """Return, for each network, the folder that the paths of its prototypes are relative to."""
    if data is not None:
        return [open_run_data(classifier, data).root] * len(classifier.networks)
    roots = [Path(record.data.root) for record in _members(classifier)]
    for root in roots:
        if not root.is_dir():
            raise UserError(f"The data is no longer at {root}; say where it is with --data DATA.")
    return roots


def member_datasets(classifier: Classifier, data: str | None) -> list[DataSet]:
    """Open for each network the data set that it was trained on, labelled by the run's numbering of the classes."""
    return [
        with_labels_of(classifier.classes, _open(record, data), set(record.data.skipped))
        for record in _members(classifier)
    ]


def open_run_data(classifier: Classifier | LoadedBaseline, data: str | None) -> DataSet:
    """Open the data set as the run (or its first member) saw it, same split and files, or other data of its classes."""
    record = layout.read_record(classifier.path)
    return with_labels_of(classifier.classes, _open(record, data), set(record.data.skipped))


def _members(classifier: Classifier | LoadedBaseline) -> list[RunRecord]:
    folders = layout.read_record(classifier.path).member_folders()
    return [layout.read_record(classifier.path / folder) for folder in folders]


def _check_new_to_all(members: Sequence[RunRecord], data: str | None, part: str) -> None:
    """Refuse images that one network of a combined run was trained on and another is judged by."""
    if len({record.data.fingerprint for record in members}) == 1:
        return
    seen: set[str] = set()
    judging = []
    for record in members:
        dataset, skipped = _open(record, data), set(record.data.skipped)
        root = str(dataset.root)  # members may come from different folders
        *earlier, images = (
            {f"{root}/{sample.path}" for sample in dataset.part(name) if sample.path not in skipped}
            for name in PARTS[: PARTS.index(part) + 1]
        )
        seen |= set().union(*earlier)
        judging.append(images)
    if any(images != judging[0] for images in judging) or judging[0] & seen:
        raise UserError(
            f"The combined runs have different {IMAGES_OF[part]}, or some were trained on others' {IMAGES_OF[part]}; "
            "name images that are new to all of them with --data DATA."
        )


def _open(record: RunRecord, data: str | None) -> DataSet:
    if data is None and not record.data.source.exists():
        raise UserError(f"The data is no longer at {record.data.source}; say where it is with --data DATA.")
    return open_by_config(data or record.data.source, record.config, strict=data is None)


def with_labels_of(classes: tuple[str, ...], dataset: DataSet, skipped: Set[str] = frozenset()) -> DataSet:
    """Return the same images less the skipped ones, labelled by the run's numbering of the classes."""
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

    parts: dict[str, Any] = {part: relabel(dataset.part(part)) for part in PARTS}
    return replace(dataset, classes=classes, **parts)


def is_training_data(classifier: Classifier | LoadedBaseline, dataset: DataSet) -> bool:
    """Return whether `dataset` holds the images the run was trained on, judged by the source of a prototype of each
    network; of a baseline, by all images."""
    if isinstance(classifier, LoadedBaseline):
        hashes = {s.path: digest_picture(dataset.root / s.path) for s in dataset.all_samples()}
        return fingerprint(dataset, hashes) == layout.read_record(classifier.path).data.fingerprint
    firsts = {prototype.member: prototype for prototype in reversed(classifier.prototypes)}
    return any(_is_file(dataset.root / first.path, first.sha256) for first in firsts.values())


def _is_file(path: Path, sha256: str) -> bool:
    return split_page(path)[0].is_file() and digest_picture(path) == sha256


def open_test_data(classifier: Classifier | LoadedBaseline, data: str | None) -> tuple[DataSet, str]:
    """Return a data set whose test part is to be evaluated on (other data without one is all of it), and its name."""
    dataset = open_run_data(classifier, data)
    if data is not None and not is_training_data(classifier, dataset):
        if "test" in dataset.held_out:
            return replace(dataset, test=dataset.all_samples()), "all"
        return dataset, "test"
    _check_new_to_all(_members(classifier), data, "test")
    return dataset, "test"


def open_out_of_distribution(classifier: Classifier, folder: str) -> DataSet:
    """Open pictures that show none of the run's classes, as the test part of a data set: all that a folder holds at
    any depth or a table lists, or, of CUB and Cars, the test images of the classes that the run does not know, cropped
    as it crops. Of many a share is drawn, the same every time. Their labels mean nothing."""
    root, config = Path(folder).expanduser().resolve(), layout.read_record(classifier.path).config
    if not root.is_dir() and not is_table(root):
        raise UserError(
            f"There is no folder and no table {folder}; name one with pictures of other things than the run's classes."
        )
    if is_benchmark(root):
        dataset = open_by_config(root, config)
        root = dataset.root
        samples = [replace(s, label=0) for s in dataset.test if dataset.classes[s.label] not in classifier.classes]
    else:
        pictures, _ = find_pictures([str(root)], config.data)
        root = root if root.is_dir() else root.parent
        samples = [Sample(os.path.relpath(path, root), 0, value_range=stated_range(config)) for path in pictures]
    if not samples:
        raise UserError(f"{folder} has no pictures of other things than the run's classes; name another folder.")
    generator = torch.Generator().manual_seed(seed_for(OUT_OF_DISTRIBUTION_SEED))
    order = torch.randperm(len(samples), generator=generator).tolist()
    return DataSet(
        root, "folder", ("unknown",), (), (), tuple(samples[number] for number in order[:MOST_OUT_OF_DISTRIBUTION])
    )


def open_held_out_data(classifier: Classifier, data: str | None) -> DataSet:
    """Return a data set whose validation part is what the run (of a combined run, every network of it) held out."""
    dataset = open_run_data(classifier, data)
    if data is not None and not is_training_data(classifier, dataset):
        raise UserError(f"{data} is not what {classifier.path} was trained on; leave out --part val to measure it.")
    _check_new_to_all(_members(classifier), data, "val")
    if not dataset.val:
        raise UserError(f"{classifier.path} has no validation images; leave out --part val.")
    return dataset


def open_validation_data(classifier: Classifier, data: str | None) -> DataSet:
    """Return a data set whose validation part is to be calibrated on: of other data, all of it."""
    dataset = open_run_data(classifier, data)
    if data is not None and not is_training_data(classifier, dataset):
        return replace(dataset, val=dataset.all_samples())
    _check_new_to_all(_members(classifier), data, "val")
    return dataset
