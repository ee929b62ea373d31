"""Where the object lies in training pictures, by masks or boxes that the data has: cells of the latent map."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.data.cells import Cells
from likethat.data.dataset import DataSet, Sample
from likethat.data.decode import Box
from likethat.data.parts import read_mask, read_parts
from likethat.data.reading.workers import map_in_threads
from likethat.errors import UserError
from likethat.progress import Advance

FINE = 8  # places along a side of a cell at which the mask is looked at
SHARE = 0.5  # of a cell that must lie on the object


def object_cells(dataset: DataSet, cells: Cells, advance: Advance | None = None) -> Tensor:
    """Return which cells of each training picture lie on its object: N x H x W. Where a picture has neither mask nor
    box, or is cropped to its box, all do; where an object is smaller than a cell the one that shows most of it does."""
    parts = read_parts(dataset)
    boxes: Mapping[str, Box] = parts.object_of if parts else {}
    if not any(sample.mask or sample.box or sample.object_box or sample.path in boxes for sample in dataset.train):
        raise UserError(
            f"{dataset.root} has neither masks nor boxes of its objects, which --on-object needs; name them in the "
            "columns of a table (mask, or x0, y0, x1, y1), or leave the option out."
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
    if sample.mask is None and (sample.box or (box or sample.object_box) is None):
        return torch.ones(height, width, dtype=torch.bool)
    return on_object(torch.from_numpy(read_mask(dataset.root, sample, (FINE * height, FINE * width), box)), cells)


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
