"""From a prototype's activation map to a rectangle in the picture."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.data.decode import Box
from likethat.errors import UserError

PERCENTILE = 95.0  # the paper's
CHUNK_PIXELS = 16_000_000  # upsampled at a time: 64 MB
ROUNDING = 4e-6  # of a map's range: pixels closer than this to the threshold are equal to it


@lru_cache(maxsize=64)
def _bicubic_matrix(size: int, cells: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a matrix, size x cells, whose product with a line is its bicubic interpolation; a map takes two."""
    matrix = F.interpolate(torch.eye(cells)[None, None], (size, cells), mode="bicubic", align_corners=False)[0, 0]
    return matrix.to(device, dtype)


def upsample(map_PHW: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """Upsample maps bicubically, as F.interpolate(align_corners=False) and OpenCV's INTER_CUBIC do, but much faster."""
    (height, width), kind = map_PHW.shape[1:], (map_PHW.device, map_PHW.dtype)
    return _bicubic_matrix(size_hw[0], height, *kind) @ map_PHW @ _bicubic_matrix(size_hw[1], width, *kind).T


def check_percentile(percentile: float) -> None:
    if not 0 <= percentile <= 100:
        raise UserError(f"The percentile of the boxes must lie between 0 and 100, and {percentile} does not.")


def activation_boxes(map_PHW: Tensor, size_hw: tuple[int, int], percentile: float = PERCENTILE) -> list[Box]:
    """Return the paper's boxes, in pixels of a picture of that size: around the pixels of the upsampled map that reach
    its percentile (numpy's 'linear' one)."""
    box_P4 = box_tensor(map_PHW, size_hw, percentile)
    return [(x0, y0, x1, y1) for x0, y0, x1, y1 in box_P4.cpu().double().tolist()]


def box_tensor(map_PHW: Tensor, size_hw: tuple[int, int], percentile: float = PERCENTILE) -> Tensor:
    """Return the same boxes as one tensor of whole numbers, P x 4."""
    check_percentile(percentile)
    return torch.cat([_boxes(chunk_PHW, size_hw, percentile) for chunk_PHW in chunks(map_PHW.float(), size_hw)])


def chunks(map_PHW: Tensor, size_hw: tuple[int, int]) -> tuple[Tensor, ...]:
    """Split the maps into groups that may be upsampled to that size at a time."""
    return map_PHW.split(max(1, CHUNK_PIXELS // (size_hw[0] * size_hw[1])))


def _boxes(map_PHW: Tensor, size_hw: tuple[int, int], percentile: float) -> Tensor:
    # Counted from its least value, a map without any contrast is exactly zero, and its box the whole picture.
    map_PHW = map_PHW - map_PHW.amin((1, 2), keepdim=True)
    pixel_Phw = upsample(map_PHW, size_hw)
    pixels = size_hw[0] * size_hw[1]
    # The linear percentile lies between two neighbours in order, so it is reached from the upper one on.
    reaching = pixels - math.ceil((pixels - 1) * percentile / 100)
    threshold_P = pixel_Phw.flatten(1).topk(reaching, dim=1, sorted=False).values.amin(1)
    threshold_P = threshold_P - ROUNDING * map_PHW.amax((1, 2))
    x0_P, x1_P = _span(pixel_Phw.amax(1) >= threshold_P[:, None])
    y0_P, y1_P = _span(pixel_Phw.amax(2) >= threshold_P[:, None])
    return torch.stack([x0_P, y0_P, x1_P, y1_P], 1)


def _span(reached_Pn: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first true place of each row, and the place after the last."""
    first_P = reached_Pn.int().argmax(1)
    return first_P, reached_Pn.shape[1] - reached_Pn.flip(1).int().argmax(1)


def cell_box(row: int, column: int, map_hw: tuple[int, int], window: tuple[int, int], size_hw: tuple[int, int]) -> Box:
    """Return the rectangle of the picture that a prototype's window covers at this place of the latent map."""
    step_y, step_x = size_hw[0] / map_hw[0], size_hw[1] / map_hw[1]
    return column * step_x, row * step_y, (column + window[1]) * step_x, (row + window[0]) * step_y
