"""Everything to tell about the prototypes of a run, and the files that show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from likethat.data.files import parse_json, read_file
from likethat.explaining.draw.render import in_shares, read_jpeg
from likethat.report.atlas import DATA, PICTURES
from likethat.runs.classifier import Classifier, Prototype
from likethat.serve.problems import Refused

ATLAS = "atlas"  # the folder in the run where `likethat atlas` leaves what it found
FROM_ATLAS = ("purity", "val_purity", "mixed", "leads", "repeats")
AtlasEntries = Mapping[int, dict[str, Any]]  # what `likethat atlas` found, by prototype


def read_atlas(folder: Path, classifier: Classifier) -> AtlasEntries:
    """Read the atlas by prototype; empty where `likethat atlas` was not run, or made another one than is needed."""
    try:
        entries = parse_json(read_file(folder / DATA))["prototypes"]
        shown = all("picture" in neighbour for entry in entries for neighbour in (*entry["train"], *entry["val"]))
        by_id = {entry["id"]: entry for entry in entries}
        known = all(_same_patch(by_id[p.id], p) for p in classifier.prototypes)
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return by_id if shown and known else {}


def _same_patch(entry: Mapping[str, Any], prototype: Prototype) -> bool:
    place = (prototype.path, prototype.row, prototype.column)
    return (entry["path"], entry["row"], entry["column"]) == place


@dataclass(frozen=True, eq=False)
class Catalogue:
    """The prototypes of one model. A new one is made when the model changes."""

    classifier: Classifier
    atlas: AtlasEntries
    atlas_folder: Path
    address: str = "/prototypes"  # of the pictures
    version: int = 0  # in the address of the pictures, so that browsers notice when they change
    scratch: Path | None = None  # where pictures lie besides the run folder
    _pictures: dict[int, dict[str, Any]] = field(default_factory=dict)  # by prototype, once they were asked for

    @cached_property
    def entries(self) -> list[dict[str, Any]]:
        weight_PK = self.classifier.weight_KP.T.tolist()
        return [self._entry(p, weights) for p, weights in zip(self.classifier.prototypes, weight_PK, strict=True)]

    def _entry(self, prototype: Prototype, weight_K: list[float]) -> dict[str, Any]:
        classes = self.classifier.classes
        others = {name: w for name, w in zip(classes, weight_K, strict=True) if w and name != prototype.class_name}
        found = self.atlas.get(prototype.id, {})
        if found and not _same_patch(found, prototype):  # another patch has taken its place
            found = {}
        return {
            "id": prototype.id,
            "class": prototype.class_name,
            "name": prototype.name,
            "network": prototype.member,
            "path": prototype.path,
            "box": list(prototype.box),
            "row": prototype.row,
            "column": prototype.column,
            "moved": prototype.moved,
            "weight": weight_K[prototype.label],
            "other_weights": others,
            **self.pictures_of(prototype),
            **{name: found.get(name) for name in FROM_ATLAS},
        }

    def pictures_of(self, prototype: Prototype) -> dict[str, Any]:
        if prototype.id not in self._pictures:
            _, size = read_jpeg(self.classifier.path, prototype.source)
            self._pictures[prototype.id] = {
                "crop": f"{self.address}/{prototype.id}/crop.jpg?v={self.version}",
                "source": f"{self.address}/{prototype.id}/source.jpg?v={self.version}",
                "source_size": list(size),
                "source_box": list(in_shares(prototype.source_box, *size)),
            }
        return self._pictures[prototype.id]

    def neighbours(self, id: int) -> dict[str, Any]:
        """Return the nearest patches of one prototype, in training and validation pictures."""

        def shown(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{**n, "picture": f"/{ATLAS}/{Path(n['picture']).name}"} for n in found]

        entry = self.atlas.get(id)
        return {part: shown(entry[part]) if entry else None for part in ("train", "val")}

    @cached_property
    def by_id(self) -> dict[int, dict[str, Any]]:
        return {entry["id"]: entry for entry in self.entries}

    def picture(self, id: int, kind: str) -> bytes:
        """Return the JPEG of a prototype's patch ('crop') or of the whole training picture ('source')."""
        prototype = next(prototype for prototype in self.classifier.prototypes if prototype.id == id)
        return self._read(prototype.crop if kind == "crop" else prototype.source)

    def atlas_picture(self, number: int) -> bytes:
        try:
            return (self.atlas_folder / PICTURES / f"{number}.webp").read_bytes()
        except OSError as error:
            raise Refused(404, "There is no such picture in the atlas.") from error

    def _read(self, name: str) -> bytes:
        """Read a picture, only from inside the run folder, whatever a damaged run says its pictures are called."""
        run = self.classifier.path.resolve()
        folders = [run, *([self.scratch.resolve()] if self.scratch else [])]
        try:
            path = (run / name).resolve()
            if any(path.is_relative_to(folder) for folder in folders) and path.suffix == ".jpg":
                return read_file(path)
        except (OSError, ValueError):  # a ValueError where no file can have such a name
            pass
        raise Refused(404, "There is no such picture in the run.")
