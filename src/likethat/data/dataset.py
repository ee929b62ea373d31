"""A data set: classes and the training, validation and test images, as found on disk."""

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from likethat.errors import UserError

PARTS = ("train", "val", "test")
IMAGES_OF = {"train": "training images", "val": "validation images", "test": "test images"}  # as people call them


@dataclass(frozen=True, slots=True)
class Sample:
    """One labelled picture."""

    path: str  # relative to the data set's root, '/'-separated; `#page=2` at its end names a page of the file
    label: int
    box: tuple[float, float, float, float] | None = None  # x0, y0, x1, y1 to crop to, in pixels of the upright picture
    group: str | None = None  # patient, nest or burst; its pictures never lie in two parts, and its name is not shown
    mask: str | None = None  # picture of the same size, not black where the object is; relative to the root as well
    weight: float = 1.0  # how much it counts in training
    row: int | None = None  # of the table that lists it, as a spreadsheet counts
    value_range: tuple[float, float] | None = None  # values that become black and white, if it has more than 8 bits
    object_box: tuple[float, float, float, float] | None = None  # where the object is, if the picture is left whole


@dataclass(frozen=True)
class DataSet:
    """Classes and three parts; `held_out` names those parts that were taken from the training images."""

    root: Path
    kind: str  # folder, table, cub or cars
    classes: tuple[str, ...]
    train: tuple[Sample, ...]
    val: tuple[Sample, ...]
    test: tuple[Sample, ...]
    held_out: tuple[str, ...] = ()
    table: Path | None = None  # file that lists the pictures

    def part(self, name: str) -> tuple[Sample, ...]:
        """Return the samples of "train", "val" or "test"."""
        if name not in PARTS:
            raise UserError(f"there is no part {name!r}: choose one of {', '.join(PARTS)}")
        samples: tuple[Sample, ...] = getattr(self, name)
        return samples

    def all_samples(self) -> tuple[Sample, ...]:
        """Return the training, then the validation, then the test samples."""
        return self.train + self.val + self.test


def leave_out(dataset: DataSet, paths: Set[str]) -> DataSet:
    """Return the data set without these pictures; the others stay in their parts."""
    train, val, test = (tuple(sample for sample in dataset.part(part) if sample.path not in paths) for part in PARTS)
    return replace(dataset, train=train, val=val, test=test)


def hold_out(
    samples: Sequence[Sample], classes: Sequence[str], fractions: Sequence[float], *, seed: int
) -> list[tuple[Sample, ...]]:
    """Take each fraction out of every class in turn: [rest, part of the first fraction, of the second, ...].

    A class gives each part at least one image while it keeps one itself. Who goes where depends on a hash of seed,
    class and path, so that a new file in one class moves nothing in the others and little in its own.
    """
    members_of: list[list[Sample]] = [[] for _ in classes]
    for sample in samples:
        members_of[sample.label].append(sample)
    parts: list[list[Sample]] = [[] for _ in range(len(fractions) + 1)]
    for class_name, members in zip(classes, members_of, strict=True):
        shuffled = sorted(members, key=lambda sample: _draw(seed, class_name, sample.path))
        taken = 0
        for part, fraction in zip(parts[1:], fractions, strict=True):
            spare = len(members) - 1 - taken
            count = max(0, min(spare, max(1, round(fraction * len(members)))))
            part += shuffled[taken : taken + count]
            taken += count
        parts[0] += shuffled[taken:]
    return [tuple(sorted(part, key=lambda sample: (sample.label, sample.path))) for part in parts]


def fingerprint(dataset: DataSet, sha256: Mapping[str, str]) -> str:
    """Return a hash of every image's path, label, box, mask, weight and content (by its own hash), part by part."""
    digest = hashlib.sha256()
    for number, sample in enumerate(dataset.all_samples()):
        line = f"{sample.path} {sample.label} {sample.box} {sha256[sample.path]}"
        if sample.mask is not None or sample.weight != 1:  # data sets without them keep the hash they always had
            line += f" {sample.mask} {sample.weight}"
        digest.update(("\n" + line if number else line).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _draw(seed: int, class_name: str, path: str) -> bytes:
    # File names need not be valid Unicode; surrogateescape gives back the bytes they have on disk.
    return hashlib.sha256(f"{seed}\0{class_name}\0{path}".encode("utf-8", "surrogateescape")).digest()
