"""The atlas of a run as a folder: a page to look through, its pictures, and the same as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from likethat.data.dataset import Sample
from likethat.data.decode import Box, View, read_image, to_input
from likethat.data.folder_kinds import ATLAS
from likethat.data.reading.workers import map_in_threads
from likethat.explaining.atlas import Atlas, Entry, Neighbour
from likethat.explaining.draw.page import write_page
from likethat.explaining.draw.render import encode, in_shares, read_picture, seen_part, shrink
from likethat.progress import Advance
from likethat.runs.atomic_files import write_text
from likethat.runs.classifier import Prototype

(PAGE, DATA), PICTURES = ATLAS, "pictures"
BUDGET = 30_000_000  # bytes for all pictures that neighbours lie in: an atlas of thousands is still easy to send
BYTES_PER_PIXEL = 0.2  # of a photograph as WebP
LEAST_SIDE, MOST_SIDE, CROP_SIDE = 96, 256, 112
MOST_CROP = 4_000  # bytes of a part
QUALITIES = (80, 60, 40, 20, 5)
MOST_OTHERS = 3  # connections to other classes that the page lists


@dataclass(frozen=True)
class Thumbnail:
    """A small picture of a sample, and the way from shares of it to pixels of the file."""

    name: str
    width: int
    height: int
    view: View

    def to_file(self, share: Box) -> list[float]:
        return [round(value, 2) for value in self.view.to_file(share)]


Thumbnails = Mapping[Sample, Thumbnail]


def write_atlas(folder: Path, atlas: Atlas, advance: Advance | None = None) -> None:
    thumbnails = _write_pictures(folder, atlas, advance)
    write_text(folder / DATA, json.dumps(to_document(atlas, thumbnails)))  # in one line: thousands are long enough
    numbers = {sample: number for number, sample in enumerate(thumbnails)}
    data = {
        "classes": list(atlas.classifier.classes),
        "pictures": [[t.name, t.width, t.height, s.label, s.path] for s, t in thumbnails.items()],
        "prototypes": [_page_entry(atlas, entry, numbers) for entry in atlas.entries],
    }
    purities = [entry.purity for entry in atlas.entries]
    val_purities = [entry.val_purity for entry in atlas.entries if entry.val_purity is not None]
    write_page(
        folder / PAGE,
        "atlas.html",
        ["likethat.report"],
        name=atlas.classifier.path.resolve().name,
        atlas=atlas,
        purity=_mean(purities),
        val_purity=_mean(val_purities),
        # What a browser takes for the end of the script must not be in it.
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def to_document(atlas: Atlas, thumbnails: Thumbnails) -> dict[str, Any]:
    """Return all that the page shows, as data. Boxes are in pixels of the image files."""
    summary = {
        "mean_distance_within_class": atlas.within_class,
        "mean_distance_between_classes": atlas.between_classes,
        "duplicates": [list(pair) for pair in atlas.duplicates],
        "never_used": atlas.never_used,
        "never_leading": atlas.never_leading,
        "background_suspects": atlas.mixed,
    }
    classes = atlas.classifier.classes

    def neighbours(found: Sequence[Neighbour]) -> list[dict[str, Any]]:
        return [
            {
                "path": n.sample.path,
                "class": classes[n.sample.label],
                "similarity": n.similarity,
                "distance": n.distance,
                "row": n.row,
                "column": n.column,
                "box": thumbnails[n.sample].to_file(n.share),
                "picture": thumbnails[n.sample].name,
                "share": [round(value, 4) for value in n.share],
            }
            for n in found
        ]

    prototypes = [
        {
            "id": entry.prototype.id,
            "name": entry.prototype.name,
            "member": entry.prototype.member,
            "class": entry.prototype.class_name,
            "path": entry.prototype.path,
            "row": entry.prototype.row,
            "column": entry.prototype.column,
            "box": list(entry.prototype.box),
            "moved": entry.prototype.moved,
            "weight": round(entry.weight, 6),
            "other_weights": {name: round(weight, 6) for name, weight in entry.other_weights.items()},
            "purity": entry.purity,
            "val_purity": entry.val_purity,
            "mixed": entry.mixed,
            "leads": entry.leads,
            "repeats": entry.repeats,
            "train": neighbours(entry.train),
            "val": neighbours(entry.val),
        }
        for entry in atlas.entries
    ]
    head = {"run": str(atlas.classifier.path), "data": str(atlas.root), "k": atlas.k, "pictures": atlas.pictures}
    return {**head, "summary": summary, "prototypes": prototypes}


def _source(prototype: Prototype) -> Sample:
    return Sample(prototype.path, prototype.label, prototype.crop_to)


def _page_entry(atlas: Atlas, entry: Entry, numbers: Mapping[Sample, int]) -> dict[str, Any]:
    """Return an entry of the page: a short one, since the page holds thousands. Boxes are x, y, width, height in per
    mille of the picture."""
    prototype = entry.prototype
    classes = atlas.classifier.classes
    source = read_picture(atlas.classifier.path, prototype.source)
    share = in_shares(prototype.source_box, *source.size)
    strongest = sorted(entry.other_weights.items(), key=lambda item: -abs(item[1]))[:MOST_OTHERS]

    def neighbours(found: Sequence[Neighbour]) -> list[list[Any]]:
        return [[numbers[n.sample], round(n.similarity, 3), _per_mille(n.share)] for n in found]

    return {
        "id": prototype.id,
        "title": prototype.title,
        "member": prototype.member,
        "label": prototype.label,
        "source": [numbers[_source(prototype)], _per_mille(share)],
        "moved": round(prototype.moved, 4),
        "weight": round(entry.weight, 3),
        "others": [[classes.index(name), round(weight, 3)] for name, weight in strongest],
        "furtherOthers": len(entry.other_weights) - len(strongest),
        "purity": entry.purity,
        "valPurity": entry.val_purity,
        "mixed": entry.mixed,
        "leads": entry.leads,
        "repeats": entry.repeats,
        "train": neighbours(entry.train),
        "val": neighbours(entry.val),
    }


def _per_mille(share: Box) -> list[int]:
    x0, y0, x1, y1 = (round(1000 * value) for value in share)
    return [x0, y0, x1 - x0, y1 - y0]


def _write_pictures(folder: Path, atlas: Atlas, advance: Advance | None) -> dict[Sample, Thumbnail]:
    """Write one picture for every image that something lies in, and one of every prototype's part."""
    (folder / PICTURES).mkdir()
    samples: dict[Sample, None] = {}
    for entry in atlas.entries:
        samples[_source(entry.prototype)] = None
        samples.update(dict.fromkeys(neighbour.sample for neighbour in (*entry.train, *entry.val)))
    limit = BUDGET // len(samples)
    side = min(MOST_SIDE, max(LEAST_SIDE, int(math.sqrt(limit / BYTES_PER_PIXEL))))

    def draw(numbered: tuple[int, Sample]) -> Thumbnail:
        number, sample = numbered
        image = read_image(atlas.root / sample.path, value_range=atlas.classifier.value_range)
        _, view = to_input(image, sample.box, (1, 1))  # shares of a picture are pixels of one of a single pixel
        small = shrink(seen_part(image, view), side)
        name = f"{PICTURES}/{number}.webp"
        (folder / name).write_bytes(_webp(small, limit))
        return Thumbnail(name, *small.size, view)

    thumbnails = {}
    for sample, thumbnail in zip(samples, map_in_threads(draw, enumerate(samples)), strict=True):
        thumbnails[sample] = thumbnail
        if advance:
            advance(len(thumbnails), len(samples))
    for entry in atlas.entries:
        crop = shrink(read_picture(atlas.classifier.path, entry.prototype.crop), CROP_SIDE)
        (folder / f"{PICTURES}/p{entry.prototype.id}.webp").write_bytes(_webp(crop, MOST_CROP))
    return thumbnails


def _webp(image: Image.Image, limit: int) -> bytes:
    """Encode in the best quality that keeps to the limit; where none does, in the least."""
    data = b""
    for quality in QUALITIES:
        data = encode(image, "WEBP", quality=quality)
        if len(data) <= limit:
            break
    return data
