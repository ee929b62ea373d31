"""Where each prototype of a run comes from: prototypes.json, checked against itself, config.json and the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from likethat.data.decode import Box
from likethat.errors import UserError
from likethat.models.protopnet import ProtoPNet
from likethat.runs import layout
from likethat.runs.layout import RunRecord
from likethat.runs.schema import damaged, read_document

SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Prototype:
    """One prototype and the training patch it is. Boxes are x0, y0, x1, y1 in pixels of the image file."""

    id: int
    label: int
    class_name: str
    path: str  # of the training image, relative to the data set's root
    sha256: str
    row: int  # place in the grid of patches of the latent map
    column: int
    cell: Box  # the rectangle of the picture that this place stands for
    box: Box  # around the pixels that the prototype activates most
    crop_to: Box | None  # the data set's own box, to which the picture was cropped first (upright pixels)
    moved: float  # L2 distance of the last projection
    crop: str  # picture of the box, a file in the run folder
    source: str  # the training picture as the network saw it, a file in the run folder
    source_box: Box  # the box in pixels of that file
    member: int = 0  # which network of a combined run
    name: str | None = None  # what a person called it

    @property
    def title(self) -> str:
        """Return the name that pages and pictures give the prototype."""
        return f"{self.name} (prototype {self.id})" if self.name else f"prototype {self.id}"


def read_prototypes(run: Path) -> list[Prototype]:
    """Read the prototypes of all members in order, numbered through; their pictures' names are relative to the run."""
    prototypes: list[Prototype] = []
    for member, folder in enumerate(layout.read_record(run).member_folders()):
        start = len(prototypes)
        prototypes += [
            replace(own, id=start + own.id, member=member, crop=f"{folder}/{own.crop}", source=f"{folder}/{own.source}")
            if folder != "."
            else own
            for own in read_own_prototypes(run / folder, layout.read_record(run / folder))
        ]
    return prototypes


def read_own_prototypes(run: Path, record: RunRecord) -> tuple[Prototype, ...]:
    """Return the prototypes of one network, of the number, classes and order that config.json says."""
    path = run / layout.PROTOTYPES
    own: tuple[Prototype, ...] = read_document(path, {"prototypes": tuple[Prototype, ...]})["prototypes"]
    labels = [label for label, count in enumerate(record.prototypes_of_class) for _ in range(count)]
    if len(own) != len(labels):
        raise damaged(path, f"it has {len(own)} prototypes where {layout.CONFIG} says {len(labels)}")
    for number, (prototype, label) in enumerate(zip(own, labels, strict=True)):
        for name in (prototype.path, prototype.crop, prototype.source):
            if _is_outside(name):
                raise UserError(f"{path} names {name!r}, outside its folder; do not use it.")
        wanted = (number, label, record.data.classes[label])
        if (prototype.id, prototype.label, prototype.class_name) != wanted:
            raise damaged(path, f"prototype {number} is not the one of class '{wanted[2]}' that {layout.CONFIG} says")
        if prototype.member != 0 or not SHA256.fullmatch(prototype.sha256) or min(prototype.row, prototype.column) < 0:
            raise damaged(path, f"prototype {number} has a member, sha256, row or column that cannot be")
    return own


def _is_outside(name: str) -> bool:
    place = PurePosixPath(name)
    return not place.parts or place.is_absolute() or ".." in place.parts or "\0" in name


def check_places(run: Path, network: ProtoPNet, own: Sequence[Prototype]) -> None:
    """Refuse prototypes beside the network's map."""
    rows, columns = network.patch_grid
    for prototype in own:
        if prototype.row >= rows or prototype.column >= columns:
            where = f"row {prototype.row}, column {prototype.column} of a map of {rows}x{columns} patches"
            raise damaged(run / layout.PROTOTYPES, f"a prototype lies at {where}")
