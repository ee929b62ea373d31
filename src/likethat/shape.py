"""Runs made out of other runs: a network with some of its prototypes, written as a run folder of its own."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from likethat import run_dir
from likethat.checkpoint import copy_state, save_tensors, write_json
from likethat.classifier import Classifier, Prototype
from likethat.data.dataset import DataSet
from likethat.errors import UserError
from likethat.models.protopnet import ProtoPNet
from likethat.pipeline import make_record, prepare
from likethat.progress import Display
from likethat.run_data import with_labels_of
from likethat.run_dir import RunRecord
from likethat.training.engine import score_images
from likethat.training.nearest import nearest_patches
from likethat.training.prune import CachedScores


@dataclass(frozen=True)
class Member:
    """One network of a run with the images it was trained on and the scores it gives them."""

    path: Path  # of the run folder that the prototypes' pictures are relative to
    record: RunRecord
    network: ProtoPNet
    prototypes: tuple[Prototype, ...]
    dataset: DataSet
    nearest_Pk: Tensor | None  # the training images nearest to each prototype, if they were asked for
    scores: dict[str, CachedScores]  # by part

    @property
    def weight_KP(self) -> Tensor:
        return self.network.last_layer.weight.detach()


def open_member(
    classifier: Classifier, number: int, data: str | None, scratch: Path, display: Display, *, nearest: int | None
) -> Member:
    """Reads the run's images again, makes sure that they are the same, and scores them once.

    With `nearest`, finds so many training images for each prototype.
    """
    device = classifier.device
    run, folder = classifier.path, run_dir.read_record(classifier.path).member_folders()[number]
    record, network = run_dir.read_record(run / folder), classifier.networks[number]
    root = Path(data or record.data.root)
    if not root.is_dir():
        raise UserError(f"The data is no longer at {root}; say where it is with --data DATA.")
    prepared = prepare(root, scratch, record.config, device, display)
    if make_record(prepared, []).data.fingerprint != record.data.fingerprint:
        raise UserError(
            f"The images under {root} are not those that {run} was trained on; restore them or name them with --data."
        )
    dataset = with_labels_of(classifier.classes, prepared.dataset)
    prototypes = tuple(prototype for prototype in classifier.prototypes if prototype.member == number)
    class_P = network.prototype_layer.class_P
    number_of = {(sample.path, sample.box): image for image, sample in enumerate(dataset.train)}
    source_P = torch.tensor([number_of[p.path, p.crop_to] for p in prototypes], device=device)
    scores = {}
    for part, images in prepared.images.items():
        images.label_N = torch.tensor([sample.label for sample in dataset.part(part)], device=device)
        with display.task(f"scores of the {part} images") as advance:
            score_NP = score_images(network, images, advance)
        # As in training: tied prototypes do not judge the images they were cut from.
        unfair = source_P if part == "train" and record.config.train.tie else None
        scores[part] = CachedScores(score_NP, images.label_N, class_P, network.num_classes, unfair)
    nearest_Pk = None
    if nearest is not None:
        with display.task("nearest training images") as advance:
            nearest_Pk = nearest_patches(network, prepared.images["train"], nearest, advance).image_Pk
    return Member(run, record, network, prototypes, dataset, nearest_Pk, scores)


def write_network(
    target: Path,
    record: RunRecord,
    network: ProtoPNet,
    keep_p: Tensor,
    class_p: Tensor,
    weight_Kp: Tensor,
    prototypes: Sequence[Prototype],
    pictures: Path,
) -> None:
    """config.json, model and prototypes of a run with the prototypes `keep_p` of a network, in that order.

    `prototypes` are all of the network's; their pictures lie in `pictures`.
    """
    labels, classes = class_p.tolist(), record.data.classes
    assert labels == sorted(labels), "prototypes lie class by class"
    state = copy_state(network)
    for name in ("prototype_PDhw", "unprojected_PDhw"):
        state[f"prototype_layer.{name}"] = state[f"prototype_layer.{name}"][keep_p.cpu()]
    state |= {"prototype_layer.class_P": class_p, "last_layer.weight": weight_Kp}
    (target / run_dir.PICTURES).mkdir(parents=True)
    replace(record, prototypes_of_class=tuple(labels.count(k) for k in range(len(classes)))).write(target)
    save_tensors(target / run_dir.MODEL, state)
    entries = []
    for number, (old, label) in enumerate(zip(keep_p.tolist(), labels, strict=True)):
        prototype = prototypes[old]
        crop = f"{run_dir.PICTURES}/{number:04d}.jpg"
        source = f"{run_dir.PICTURES}/{Path(prototype.source).name}"
        _copy(pictures / prototype.crop, target / crop)
        if not (target / source).exists():
            _copy(pictures / prototype.source, target / source)
        fresh = replace(prototype, id=number, label=label, class_name=classes[label], crop=crop, source=source)
        entries.append(asdict(replace(fresh, member=0)))
    write_json(target / run_dir.PROTOTYPES, {"prototypes": entries})


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise UserError(f"{source} could not be copied to {target} ({error.strerror or error}).") from error


def write_combined(target: Path, records: Sequence[RunRecord]) -> None:
    """config.json of a run whose networks lie in its members' folders."""
    per_class = zip(*(record.prototypes_of_class for record in records), strict=True)
    first = records[0]
    RunRecord(first.config, first.data, tuple(map(sum, per_class)), run_dir.COMBINED, len(records)).write(target)
