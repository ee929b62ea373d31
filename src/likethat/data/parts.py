"""Where the annotated parts of a picture lie: CUB's part points, the embedded birds' part boxes, masks of objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from likethat.data.cub import find_cub, read_boxes, read_table
from likethat.data.dataset import DataSet, Sample
from likethat.data.decode import Box, View, read_image, to_input
from likethat.data.files import parse_json, read_file
from likethat.data.folder_kinds import GUIDE_FILE, PARTS_FILE
from likethat.errors import UserError

HIDDEN = (np.nan,) * 4


@dataclass(frozen=True)
class PartTable:
    """Parts by picture, in pixels of the upright picture. A part known by a point is a box without extent."""

    names: tuple[str, ...]
    part_of: Mapping[str, np.ndarray]  # path of the picture -> Q x 4 boxes, NaN where the part is hidden
    object_of: Mapping[str, Box]  # path of the picture -> the whole object
    pairs: tuple[tuple[str, str, int], ...] = ()  # two classes and the number of the only part they differ in

    @property
    def sides(self) -> list[int]:
        """Return for each part its number once left and right are not told apart."""
        merged = [name.removeprefix("left ").removeprefix("right ") for name in self.names]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(merged))}
        return [numbers[name] for name in merged]

    def shares(self, samples: Sequence[Sample], views: Sequence[View | None]) -> tuple[np.ndarray, np.ndarray]:
        """Return N x Q x 4 boxes of the parts and N x 4 boxes of the objects, in shares of what the network sees; NaN
        where nothing is known."""
        part_NQ4 = np.full((len(samples), len(self.names), 4), np.nan, np.float32)
        object_N4 = np.full((len(samples), 4), np.nan, np.float32)
        for number, (sample, view) in enumerate(zip(samples, views, strict=True)):
            if view is not None and sample.path in self.part_of:
                part_NQ4[number] = view.to_shares(self.part_of[sample.path])
            if view is not None and sample.path in self.object_of:
                object_N4[number] = view.to_shares(np.array([self.object_of[sample.path]]))[0]
        return part_NQ4, object_N4


def read_mask(root: Path, sample: Sample, size_hw: tuple[int, int], box: Box | None = None) -> np.ndarray:
    """Return where the object of a picture is, as a network with inputs of that size sees it: H x W, from 0 to 1. That
    is what the picture's mask shows, or the inside of its box where it has no mask, of the one that is given or else of
    the sample's own."""
    if sample.mask is not None:
        drawn = np.asarray(read_image(root / sample.mask)).max(2) > 0
    else:
        box = box or sample.object_box
        assert box is not None
        width, height = read_image(root / sample.path, value_range=sample.value_range).size
        x0, y0, x1, y1 = (max(0, round(side)) for side in box)
        drawn = np.zeros((height, width), bool)
        drawn[y0:y1, x0:x1] = True
    mask = Image.fromarray(drawn.astype(np.uint8) * 255).convert("RGB")
    return to_input(mask, sample.box, size_hw)[0][..., 0].astype(np.float32) / 255


def read_parts(dataset: DataSet) -> PartTable | None:
    """Read the data set's part annotations; return None where it has none."""
    if dataset.kind == "cub" and (root := find_cub(dataset.root)) and (root / "parts/part_locs.txt").is_file():
        return _read_cub(root)
    if (dataset.root / PARTS_FILE).is_file():
        return _read_birds(dataset.root)
    return None


def _read_cub(root: Path) -> PartTable:
    names = read_table(root / "parts/parts.txt")
    number_of = {part_id: number for number, part_id in enumerate(names)}
    path_of = {image_id: f"images/{name}" for image_id, name in read_table(root / "images.txt").items()}
    part_of = {path: np.full((len(names), 4), np.nan) for path in path_of.values()}
    file = root / "parts/part_locs.txt"
    try:
        for line in read_file(file).decode("utf-8").splitlines():
            image_id, part_id, x, y, visible = line.split()
            if visible == "1" and image_id in path_of:
                part_of[path_of[image_id]][number_of[part_id]] = (float(x), float(y)) * 2
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{file} is damaged ({error!r}): unpack CUB_200_2011 again") from error
    boxes = root / "bounding_boxes.txt"
    object_of = {path_of[key]: box for key, box in read_boxes(boxes).items() if key in path_of}
    return PartTable(tuple(names.values()), part_of, object_of)


def _read_birds(root: Path) -> PartTable:
    """Read parts.json and species.json as `likethat data synth` writes them."""
    file = root / PARTS_FILE
    try:
        boxes: dict[str, dict[str, Any]] = parse_json(read_file(file))
        names = tuple(dict.fromkeys(name for parts in boxes.values() for name in parts if name != "bird"))
        part_of = {path: np.array([parts.get(name, HIDDEN) for name in names], float) for path, parts in boxes.items()}
        object_of: dict[str, Box] = {path: tuple(parts["bird"]) for path, parts in boxes.items() if "bird" in parts}
        file = root / GUIDE_FILE
        guide = parse_json(read_file(file)) if file.is_file() else {"pairs": []}
        pairs = tuple((pair["a"], pair["b"], names.index(pair["part"])) for pair in guide["pairs"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({error!r}); restore it, or remove it to go without parts.") from error
    return PartTable(names, part_of, object_of, pairs)
