"""Runs made out of other runs: a network with some of its prototypes, written as a run folder of its own."""

from __future__ import annotations

import shutil
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from likethat.config.settings import ModelConfig
from likethat.data.dataset import DataSet, leave_out
from likethat.data.formats import open_by_config
from likethat.data.loaders import Images, image_weights
from likethat.data.reading.pages import split_page
from likethat.errors import UserError
from likethat.explaining.gallery import source_names
from likethat.inference.nearest import nearest_patches
from likethat.inference.passes import last_layer_images
from likethat.inference.score_cache import cache_scores
from likethat.models.protopnet import ProtoPNet
from likethat.models.prototypes import PrototypeLayer
from likethat.progress import Display
from likethat.runs import layout
from likethat.runs.atomic_files import copy_state, save_tensors, write_json
from likethat.runs.classifier import Classifier, Prototype
from likethat.runs.data import with_labels_of
from likethat.runs.layout import RunRecord
from likethat.training.last_layer import of_views
from likethat.training.pruning.prune import CachedScores
from likethat.workflows.run_setup import PreparedRun, make_record, prepare

GONE = -1  # in place of the number of an image that was withdrawn


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
    """Read the run's images again, make sure that they are the same, and score them once.

    With `nearest`, finds so many training images for each prototype.
    """
    device = classifier.device
    run, folder = classifier.path, layout.read_record(classifier.path).member_folders()[number]
    record, network = layout.read_record(run / folder), classifier.networks[number]
    prepared = read_images(classifier, record, data, scratch, display)
    dataset = prepared.dataset
    prototypes = tuple(prototype for prototype in classifier.prototypes if prototype.member == number)
    class_P = network.prototype_layer.class_P
    source_P = torch.tensor(source_images(prototypes, dataset), device=device)
    scores = {}
    for part, images in prepared.images.items():
        # As in training: the last layer learns from views, and tied prototypes do not judge what they were cut from.
        scored = last_layer_images(images, record.config) if part == "train" else images
        with display.task(f"scores of the {part} images") as advance:
            score_NP = cache_scores(network, scored, None, scratch / f"scores{number}{part}.f16", advance)
        unfair = source_P if part == "train" and record.config.train.tie else None
        weight_N = image_weights(dataset.train, balance=record.config.train.balance) if part == "train" else None
        weight_N = of_views(weight_N, len(scored) // max(1, len(images)))
        scores[part] = CachedScores(
            score_NP, scored.label_N, class_P, network.num_classes, unfair, len(images), scratch, weight_N
        )
    nearest_Pk = None
    if nearest is not None:
        with display.task("nearest training images") as advance:
            nearest_Pk = nearest_patches(network, prepared.images["train"], nearest, advance).image_Pk
    return Member(run, record, network, prototypes, dataset, nearest_Pk, scores)


def read_images(
    classifier: Classifier,
    record: RunRecord,
    data: str | None,
    scratch: Path,
    display: Display,
    withdrawn: Set[str] = frozenset(),
) -> PreparedRun:
    """Decode all images of a run but the withdrawn ones, and make sure that they are the same as in training."""
    source, skipped = Path(data or record.data.source), set(record.data.skipped)
    if not source.exists():
        raise UserError(f"The data is no longer at {source}; say where it is with --data DATA.")
    if withdrawn:
        root = open_by_config(source, record.config).root
        removed = {path for path in withdrawn if not split_page(root / path)[0].exists()}
        skipped |= removed
    prepared = prepare(source, scratch, record.config, classifier.device, display, begins=False, without=skipped)
    if make_record(prepared, []).data.fingerprint != record.data.fingerprint:
        if not withdrawn or not removed:
            raise UserError(
                f"The images of {source} are not those that {classifier.path} was trained on; restore them or name "
                "them with --data."
            )
        display.line(f"note: {len(removed)} withdrawn pictures are gone already, so nothing tells whether others are")
    prepared = _without(prepared, withdrawn)
    dataset = with_labels_of(classifier.classes, prepared.dataset)
    for part, images in prepared.images.items():
        images.label_N = torch.tensor([sample.label for sample in dataset.part(part)], device=classifier.device)
    return replace(prepared, dataset=dataset)


def _without(prepared: PreparedRun, paths: Set[str]) -> PreparedRun:
    if not paths:
        return prepared
    images = {}
    for part, held in prepared.images.items():
        kept = [number for number, sample in enumerate(prepared.dataset.part(part)) if sample.path not in paths]
        keep_n = torch.tensor(kept, dtype=torch.long)
        pixels = held.pixel_NHW3[keep_n.to(held.pixel_NHW3.device)]
        images[part] = Images(pixels, held.label_N[keep_n.to(held.label_N.device)], held.device)
    return replace(prepared, dataset=leave_out(prepared.dataset, paths), images=images)


def source_images(prototypes: Sequence[Prototype], dataset: DataSet) -> list[int]:
    """Return the numbers of the training images that prototypes were cut from; GONE for those that were withdrawn."""
    number_of = {(sample.path, sample.box): image for image, sample in enumerate(dataset.train)}
    return [number_of.get((prototype.path, prototype.crop_to), GONE) for prototype in prototypes]


def rebuild(network: ProtoPNet, config: ModelConfig, layer: PrototypeLayer, weight_KP: Tensor) -> ProtoPNet:
    """Return a network with other prototypes and connections that shares everything before them with `network`."""
    built = ProtoPNet(network.backbone, config, layer.class_P.bincount(minlength=len(weight_KP)).tolist())
    built.add_on, built.prototype_layer = network.add_on, layer
    built.last_layer.weight = torch.nn.Parameter(weight_KP.detach().clone())
    return built.eval()


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
    """Write config.json, model and prototypes of a run with the prototypes `keep_p` of a network, in that order.

    `prototypes` are all of the network's; their pictures lie in `pictures`.
    """
    labels, classes = class_p.tolist(), record.data.classes
    assert labels == sorted(labels), "prototypes lie class by class"
    state = copy_state(network)
    for name in ("prototype_PDhw", "unprojected_PDhw"):
        state[f"prototype_layer.{name}"] = state[f"prototype_layer.{name}"][keep_p.cpu()]
    state |= {"prototype_layer.class_P": class_p, "last_layer.weight": weight_Kp}
    (target / layout.PICTURES).mkdir(parents=True)
    replace(record, prototypes_of_class=tuple(labels.count(k) for k in range(len(classes)))).write(target)
    save_tensors(target / layout.MODEL, state)
    kept, entries = [prototypes[old] for old in keep_p.tolist()], []
    sources = source_names((prototype.sha256, prototype.crop_to) for prototype in kept)
    for number, (prototype, label) in enumerate(zip(kept, labels, strict=True)):
        crop = f"{layout.PICTURES}/{number:04d}.jpg"
        source = sources[prototype.sha256, prototype.crop_to]
        _copy(pictures / prototype.crop, target / crop)
        if not (target / source).exists():
            _copy(pictures / prototype.source, target / source)
        fresh = replace(prototype, id=number, label=label, class_name=classes[label], crop=crop, source=source)
        entries.append(asdict(replace(fresh, member=0)))
    write_json(target / layout.PROTOTYPES, {"prototypes": entries})


def copy_history(run: Path, target: Path) -> None:
    """Copy the edits of the run, where somebody made any."""
    if (run / layout.EDITS).is_file():
        _copy(run / layout.EDITS, target / layout.EDITS)


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise UserError(f"{source} could not be copied to {target} ({error.strerror or error}).") from error


def write_combined(target: Path, records: Sequence[RunRecord]) -> None:
    """Write config.json of a run whose networks lie in its members' folders."""
    per_class = zip(*(record.prototypes_of_class for record in records), strict=True)
    first = records[0]
    RunRecord(first.config, first.data, tuple(map(sum, per_class)), layout.COMBINED, len(records)).write(target)
