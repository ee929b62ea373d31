"""Where the object lies in training pictures, by masks or boxes that the data has: cells of the latent map."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from likethat.data.cells import Cells
from likethat.data.check import map_in_threads
from likethat.data.dataset import DataSet, Sample
from likethat.data.decode import Box, read_image, to_input
from likethat.data.parts import read_mask, read_parts
from likethat.errors import UserError
from likethat.progress import Advance

FINE = 8  # places along a side of a cell at which the mask is looked at
SHARE = 0.5  # of a cell that must lie on the object


def object_cells(dataset: DataSet, cells: Cells, advance: Advance | None = None) -> Tensor:
    """Return which cells of each training picture lie on its object: N x H x W. Where a picture has neither mask nor
    box all do, and where an object is smaller than a cell the one that shows most of it does."""
    parts = read_parts(dataset)
    boxes: Mapping[str, Box] = parts.object_of if parts else {}
    if not any(sample.mask or sample.path in boxes for sample in dataset.train):
        raise UserError(
            f"{dataset.root} has neither masks nor boxes of its objects, which --on-object needs; name masks in a "
            "column mask of a table, or leave the option out."
        )

    def look(sample: Sample) -> Tensor:
        return _cells_of(dataset, sample, boxes.get(sample.path), cells)

    found = []
    for on_HW in map_in_threads(look, dataset.train):
        found.append(on_HW)
        if advance:
            advance(len(found), len(dataset.train))
    return torch.stack(found)


def _cells_of(dataset: DataSet, sample: Sample, box: Box | None, cells: Cells) -> Tensor:
    height, width = cells.size_hw
    fine_hw = (FINE * height, FINE * width)
    if sample.mask:
        return on_object(torch.from_numpy(read_mask(dataset.root, sample, fine_hw)), cells)
    if box is None:
        return torch.ones(height, width, dtype=torch.bool)
    picture = read_image(dataset.root / sample.path, value_range=sample.value_range)
    mask = Image.new("RGB", picture.size)
    x0, y0, x1, y1 = map(round, box)
    mask.paste("white", (x0, y0, x1, y1))
    fine_HW3, _ = to_input(mask, sample.box, fine_hw)
    return on_object(torch.from_numpy(fine_HW3[..., 0].astype(np.float32) / 255), cells)


def on_object(fine_HW: Tensor, cells: Cells) -> Tensor:
    """Return which cells have at least half of their middle on the object, by a mask of values from 0 to 1."""
    share_hw = F.avg_pool2d(fine_HW[None, None], FINE, stride=1)[0, 0]  # of the square that begins at each place
    places = []
    for middle_HW, side, count in zip(
        cells.coordinates(torch.device("cpu")), fine_HW.shape, share_hw.shape, strict=True
    ):
        places.append(((middle_HW + 1) / 2 * side - FINE / 2).round().long().clamp(0, count - 1))
    share_HW = share_hw[places[0], places[1]]
    most = float(share_HW.max())
    return share_HW >= min(SHARE, most) if most > 0 else torch.ones_like(share_HW, dtype=torch.bool)
