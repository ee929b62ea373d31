"""What every prototype looks for: the patches nearest to it, in training and validation pictures of any class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from likethat.data.dataset import DataSet, Sample, fingerprint
from likethat.data.decode import Box
from likethat.data.reading.pages import digest_picture
from likethat.data.reading.workers import map_in_threads
from likethat.distributed import gather_rows
from likethat.errors import UserError
from likethat.explaining.boxes import match_boxes
from likethat.explaining.draw.render import in_shares
from likethat.explaining.latent import Latent, latent_space
from likethat.inference.nearest import NearestPatches, Search
from likethat.inference.passes import own_batches_of_files
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Advance, Display
from likethat.runs import layout
from likethat.runs.classifier import Classifier, Prototype

MIXED = 0.5  # purity below which neighbours are called mixed


@dataclass(frozen=True)
class Neighbour:
    """A picture and its patch that is nearest to a prototype."""

    sample: Sample
    similarity: float
    distance: float  # squared L2
    row: int
    column: int
    share: Box  # around the pixels that the prototype activates most, in shares of the picture that the network saw


@dataclass(frozen=True)
class Entry:
    """All about one prototype."""

    prototype: Prototype
    weight: float  # of the connection to its own class
    other_weights: dict[str, float]  # connections to other classes that are not zero
    train: tuple[Neighbour, ...]  # nearest first, one an image
    val: tuple[Neighbour, ...]
    purity: float  # share of the nearest training patches that are of the prototype's class
    val_purity: float | None
    leads: int  # pictures of either part in which no prototype gives more points to the picture's class
    repeats: int | None  # an earlier prototype that is the same

    @property
    def mixed(self) -> bool:
        """Return whether neighbours are of several classes: the prototype may see background, or what classes share."""
        return self.purity < MIXED


@dataclass(frozen=True)
class Atlas:
    classifier: Classifier
    root: Path
    k: int
    pictures: dict[str, int]  # how many were searched, by part
    entries: tuple[Entry, ...]
    within_class: float | None  # mean L2 distance between two prototypes of one class
    between_classes: float | None

    @property
    def mixed(self) -> list[int]:
        return [entry.prototype.id for entry in self.entries if entry.mixed]

    @property
    def duplicates(self) -> list[tuple[int, int]]:
        return [(entry.repeats, entry.prototype.id) for entry in self.entries if entry.repeats is not None]

    @property
    def never_used(self) -> list[int]:
        """Return the prototypes that no class has a connection to."""
        return [entry.prototype.id for entry in self.entries if not entry.weight and not entry.other_weights]

    @property
    def never_leading(self) -> list[int]:
        return [entry.prototype.id for entry in self.entries if not entry.leads]


def check_unchanged(classifier: Classifier, dataset: DataSet) -> None:
    """Refuse pictures other than those of the training: they would make the atlas wrong in silence."""
    paths = [sample.path for sample in dataset.all_samples()]
    sha256 = dict(zip(paths, map_in_threads(lambda path: _sha256(dataset.root / path), paths), strict=True))
    changed = [p.path for p in classifier.prototypes if sha256.get(p.path) != p.sha256]
    if changed:
        raise UserError(
            f"{dataset.root / changed[0]}, which a prototype comes from, has changed or gone since training; "
            "restore the data, or say where it is with --data DATA."
        )
    if fingerprint(dataset, sha256) != layout.read_record(classifier.path).data.fingerprint:
        raise UserError(
            f"The images under {dataset.root} are not those that {classifier.path} was trained on; restore them, or "
            "say where they are with --data DATA."
        )


def _sha256(path: Path) -> str:
    try:
        return digest_picture(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); restore it.") from error


def make_atlas(classifier: Classifier, dataset: DataSet, k: int, display: Display) -> Atlas:
    """Search the training and validation images once for every network."""
    if k < 1:
        raise UserError(f"At least 1 neighbour must be searched for, and --k is {k}.")
    parts = {"train": dataset.train, "val": dataset.val}  # who corrects by an atlas must not see what judges later
    neighbours: dict[str, list[tuple[Neighbour, ...]]] = {part: [] for part in parts}
    leads_P = torch.zeros(len(classifier.prototypes), dtype=torch.long)
    for part, samples in parts.items():
        leaders = []
        for model in classifier.networks:
            with display.task(f"searching the {part} images") as advance:
                nearest, leader_N2 = _sweep(model, dataset.root, samples, k, advance)
            neighbours[part] += _neighbours(model, nearest, samples)
            leaders.append(leader_N2)
        leads_P += _count_leads(classifier, leaders)
    latent = latent_space(classifier)
    return Atlas(
        classifier,
        dataset.root,
        k,
        {part: len(samples) for part, samples in parts.items()},
        _entries(classifier, neighbours, leads_P, latent),
        latent.within_class,
        latent.between_classes,
    )


@torch.no_grad()
def _sweep(
    model: ProtoPNet, root: Path, samples: Sequence[Sample], k: int, advance: Advance
) -> tuple[NearestPatches, Tensor]:
    """Return the nearest patches and, of each image, the prototype that gives its class most points, and the points."""
    model.eval()
    search = Search(model, k)
    leader_N2 = torch.zeros(len(samples), 2, dtype=torch.double)
    size_hw, device = model.backbone.input_size, search.image_Pk.device
    for index_B, x_B3HW, label_B in own_batches_of_files(root, samples, size_hw, device, advance):
        output = model(x_B3HW)
        search.offer(index_B, output.distance_BPHW)
        points_B, leader_B = (output.score_BP * model.last_layer.weight[label_B]).max(1)
        leader_N2[index_B] = torch.stack([points_B.cpu().double(), leader_B.cpu().double()], 1)
    return search.found(), gather_rows(leader_N2)


def _count_leads(classifier: Classifier, leaders: Sequence[Tensor]) -> Tensor:
    """Count how often each prototype of any member leads. A picture whose class nobody gives a point has no leader."""
    count = len(classifier.prototypes)
    starts = torch.tensor([0, *(len(model.prototype_layer.class_P) for model in classifier.networks)]).cumsum(0)
    points_MN, leader_MN = torch.stack(list(leaders)).unbind(2)
    points_N, member_N = points_MN.max(0)
    leader_N = leader_MN.gather(0, member_N[None])[0].long() + starts[member_N]
    return leader_N[points_N > 0].bincount(minlength=count)


def _neighbours(model: ProtoPNet, nearest: NearestPatches, samples: Sequence[Sample]) -> list[tuple[Neighbour, ...]]:
    of_distance = model.prototype_layer.similarity.of_distance
    height, width = model.backbone.input_size
    boxes = iter(match_boxes(model, of_distance(nearest.map_PkHW.flatten(0, 1))))
    distance_Pk, found = nearest.distance_Pk, []
    columns = (of_distance(distance_Pk), distance_Pk, nearest.image_Pk, nearest.row_Pk, nearest.column_Pk)
    for values in zip(*(column.tolist() for column in columns), strict=True):
        mine = []
        for similarity, distance, image, row, column in zip(*values, strict=True):
            share = in_shares(next(boxes), width, height)
            mine.append(Neighbour(samples[image], similarity, distance, row, column, share))
        found.append(tuple(mine))
    return found


def _entries(
    classifier: Classifier, neighbours: dict[str, list[tuple[Neighbour, ...]]], leads_P: Tensor, latent: Latent
) -> tuple[Entry, ...]:
    entries = []
    weight_PK = classifier.weight_KP.T.tolist()
    for number, prototype in enumerate(classifier.prototypes):
        weights = dict(zip(classifier.classes, weight_PK[number], strict=True))
        own = weights.pop(prototype.class_name)
        train, val = neighbours["train"][number], neighbours["val"][number]
        first = latent.first_same_P[number]
        entries.append(
            Entry(
                prototype,
                own,
                {name: weight for name, weight in weights.items() if weight},
                train,
                val,
                _purity(prototype, train),
                _purity(prototype, val) if val else None,
                int(leads_P[number]),
                None if first is None else classifier.prototypes[first].id,
            )
        )
    return tuple(entries)


def _purity(prototype: Prototype, neighbours: Sequence[Neighbour]) -> float:
    return sum(neighbour.sample.label == prototype.label for neighbour in neighbours) / len(neighbours)
