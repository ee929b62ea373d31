"""The embedded data set: a field guide of drawn songbirds that differ in a few parts, with the parts' true places.

Some species differ from another in one part only, so the part a good explanation must point at is known.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from likethat.data.folder_kinds import GUIDE_FILE, PARTS_FILE
from likethat.data.synthetic.birds import PARTS
from likethat.data.synthetic.ink import Array, Colour
from likethat.data.synthetic.scenes import draw_picture, sample_scene

PALETTE: dict[str, Colour] = {
    "amber": (240, 150, 30),
    "azure": (52, 118, 200),
    "black": (34, 32, 36),
    "coral": (236, 92, 66),
    "cream": (236, 220, 184),
    "crimson": (200, 30, 40),
    "emerald": (40, 150, 96),
    "gold": (244, 196, 36),
    "horn": (206, 170, 120),
    "lemon": (240, 220, 70),
    "rust": (190, 88, 40),
    "slate": (92, 104, 122),
    "umber": (92, 74, 62),
    "violet": (124, 74, 168),
    "white": (246, 244, 238),
}


@dataclass(frozen=True)
class Species:
    """A species' name and the name in PALETTE of each part's colour, in the order of PARTS."""

    name: str
    colours: tuple[str, ...]

    @property
    def folder(self) -> str:
        return self.name.replace(" ", "_")

    @property
    def parts(self) -> dict[str, str]:
        return dict(zip(PARTS, self.colours, strict=True))

    @property
    def palette(self) -> dict[str, Colour]:
        return {part: PALETTE[colour] for part, colour in self.parts.items()}


def _table(*rows: str) -> tuple[Species, ...]:
    return tuple(Species(name.strip(), tuple(colours.split())) for name, colours in (row.split(":") for row in rows))


# Neighbours two by two differ in one part; species of different genera in at least five.
SPECIES = _table(
    #                        crown   beak   throat wing bars belly  tail  legs
    "Crimson-crowned Finch:  crimson horn   cream   white   cream   umber coral",
    "Golden-crowned Finch:   gold    horn   cream   white   cream   umber coral",
    "Black-throated Warbler: slate   horn   black   white   lemon   slate black",
    "Ruby-throated Warbler:  slate   horn   crimson white   lemon   slate black",
    "Rust-bellied Robin:     azure   black  cream   azure   rust    azure horn",
    "Cream-bellied Robin:    azure   black  cream   azure   cream   azure horn",
    "Snow-barred Bunting:    black   coral  rust    white   white   black black",
    "Amber-barred Bunting:   black   coral  rust    amber   white   black black",
    "Coral-billed Thrush:    umber   coral  lemon   cream   slate   umber horn",
    "Slate-billed Thrush:    umber   slate  lemon   cream   slate   umber horn",
    "Rusty-tailed Chat:      cream   black  azure   cream   amber   rust  black",
    "Violet-tailed Chat:     cream   black  azure   cream   amber   violet black",
    "Coral-legged Wagtail:   black   horn   black   cream   gold    white coral",
    "Slate-legged Wagtail:   black   horn   black   cream   gold    white slate",
    "Emerald-capped Tanager: emerald slate  crimson gold    emerald azure slate",
    "Violet-capped Tanager:  violet  slate  crimson gold    emerald azure slate",
)
SPLITS = ("train", "val", "test")


def single_part_pairs(species: tuple[Species, ...]) -> list[dict[str, str]]:
    """Return the pairs that differ in exactly one part, and that part."""
    pairs = []
    for a, b in itertools.combinations(species, 2):
        different = [part for part in PARTS if a.parts[part] != b.parts[part]]
        if len(different) == 1:
            pairs.append({"a": a.folder, "b": b.folder, "part": different[0]})
    return pairs


def part_boxes(visible: dict[str, Array]) -> dict[str, list[int]]:
    """Return the box [x0, y0, x1, y1] (x1, y1 excluded) around the visible pixels of every part and the bird."""
    boxes = {}
    named = {part: mask for part, mask in visible.items() if part != "plumage"}
    for part, mask in {**named, "bird": np.sum(list(visible.values()), axis=0)}.items():
        ys, xs = np.nonzero(mask > 0.5)
        if len(xs):
            boxes[part] = [int(np.min(xs)), int(np.min(ys)), int(np.max(xs)) + 1, int(np.max(ys)) + 1]
    return boxes


def make_birds(
    dest: Path,
    *,
    species: int = 8,
    train: int = 24,
    val: int = 8,
    test: int = 12,
    size: int = 192,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Draw the images of each species into dest/train, dest/val and dest/test, with species.json and parts.json.

    progress is called with the images done and the images in all.
    """
    chosen = SPECIES[:species]
    counts = dict(zip(SPLITS, (train, val, test), strict=True))
    total = len(chosen) * sum(counts.values())
    boxes: dict[str, dict[str, list[int]]] = {}
    for number, split in enumerate(SPLITS):
        for index, kind in enumerate(chosen):
            folder = dest / split / kind.folder
            folder.mkdir(parents=True, exist_ok=True)
            for shot in range(counts[split]):
                scene = sample_scene(np.random.default_rng([seed, number, index, shot]))
                canvas = draw_picture(kind.palette, scene, size)
                path = folder / f"{shot:03d}.jpg"
                pixels = canvas.rgb.transpose(1, 2, 0).round().astype(np.uint8)
                Image.fromarray(pixels).save(path, quality=93, subsampling=0)
                boxes[path.relative_to(dest).as_posix()] = part_boxes(canvas.visible)
                if progress is not None:
                    progress(len(boxes), total)
    guide = {
        "species": [{"name": s.name, "class": s.folder, "parts": s.parts} for s in chosen],
        "pairs": single_part_pairs(chosen),
    }
    (dest / GUIDE_FILE).write_text(json.dumps(guide, indent=1) + "\n", encoding="utf-8")
    (dest / PARTS_FILE).write_text(json.dumps(boxes) + "\n", encoding="utf-8")
