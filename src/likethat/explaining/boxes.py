"""From a prototype's activation map to a rectangle in the picture."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.data.decode import Box
from likethat.errors import UserError
from likethat.models.backbone import Backbone
from likethat.models.protopnet import ProtoPNet
from likethat.windows import Windows

Place = TypeVar("Place", int, Tensor)

PERCENTILE = 95.0  # the paper's
CHUNK_PIXELS = 16_000_000  # upsampled at a time: 64 MB
PLACES = 56  # rows and columns of a map of windows, at most
SEEN_ALONE = "The box is all that the model has seen: nothing outside it can change the similarity."
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


def match_boxes(
    model: ProtoPNet, similarity_PHW: Tensor, percentile: float = PERCENTILE, map_PHW: Tensor | None = None
) -> list[Box]:
    """Return where prototypes are found in a picture, in pixels of what the network sees: the boxes of `map_PHW`, where
    another map than that of the cells is asked for and a box is not all that was seen."""
    check_percentile(percentile)
    if map_PHW is not None and model.backbone.windows is None:
        return activation_boxes(map_PHW, model.backbone.input_size, percentile)
    return _as_boxes(cell_boxes(model, similarity_PHW, percentile))


def cell_boxes(model: ProtoPNet, similarity_PHW: Tensor, percentile: float = PERCENTILE) -> Tensor:
    """Return where cells find prototypes, P x 4, whole numbers: all that the most similar patch has seen, where that is
    a window; else the paper's box with the run's margin around it.

    The paper's box ends between the middles of cells, where the upsampled map falls. Cells see more than themselves: a
    box must reach their rims at least to hold what they go by.
    """
    if model.backbone.windows is not None:
        return window_boxes(model, similarity_PHW)
    (margin_y, margin_x), (height, width) = margin_of(model), model.backbone.input_size
    box_P4 = box_tensor(similarity_PHW, (height, width), percentile)
    x0_P, y0_P, x1_P, y1_P = box_P4.unbind(1)
    left_top = [(x0_P - margin_x).clamp(min=0), (y0_P - margin_y).clamp(min=0)]
    return torch.stack([*left_top, (x1_P + margin_x).clamp(max=width), (y1_P + margin_y).clamp(max=height)], 1)


def margin_of(model: ProtoPNet) -> tuple[int, int]:
    """Return what boxes have around the most active pixels, in pixels along y and along x."""
    (height, width), (rows, columns) = model.backbone.input_size, model.backbone.map_size
    return round(model.box_margin * height / rows), round(model.box_margin * width / columns)


def activation_boxes(map_PHW: Tensor, size_hw: tuple[int, int], percentile: float = PERCENTILE) -> list[Box]:
    """Return the paper's boxes, in pixels of a picture of that size: around the pixels of the upsampled map that reach
    its percentile (numpy's 'linear' one)."""
    return _as_boxes(box_tensor(map_PHW, size_hw, percentile))


def _as_boxes(box_P4: Tensor) -> list[Box]:
    return [(x0, y0, x1, y1) for x0, y0, x1, y1 in box_P4.cpu().double().tolist()]


def box_tensor(map_PHW: Tensor, size_hw: tuple[int, int], percentile: float = PERCENTILE) -> Tensor:
    """Return the same boxes as one tensor of whole numbers, P x 4."""
    check_percentile(percentile)
    return torch.cat([_boxes(chunk_PHW, size_hw, percentile) for chunk_PHW in chunks(map_PHW.float(), size_hw)])


def window_boxes(model: ProtoPNet, similarity_PHW: Tensor) -> Tensor:
    """P x 4, whole numbers: all that the most similar patch of each map has seen."""
    place_P, columns = similarity_PHW.flatten(1).argmax(1), similarity_PHW.shape[2]
    return torch.stack(_window_box(model, place_P // columns, place_P % columns), 1)


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
    threshold_P = _nth_largest(pixel_Phw.flatten(1), reaching)
    threshold_P = threshold_P - ROUNDING * map_PHW.amax((1, 2))
    x0_P, x1_P = _span(pixel_Phw.amax(1) >= threshold_P[:, None])
    y0_P, y1_P = _span(pixel_Phw.amax(2) >= threshold_P[:, None])
    return torch.stack([x0_P, y0_P, x1_P, y1_P], 1)


def _nth_largest(value_Pn: Tensor, number: int) -> Tensor:
    if value_Pn.device.type != "cpu":
        return value_Pn.topk(number, dim=1, sorted=False).values.amin(1)
    place = value_Pn.shape[1] - number  # numpy's is twice as quick there
    return torch.from_numpy(np.partition(value_Pn.detach().numpy(), place, axis=1)[:, place].copy())


def _span(reached_Pn: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first true place of each row, and the place after the last."""
    first_P = reached_Pn.int().argmax(1)
    return first_P, reached_Pn.shape[1] - reached_Pn.flip(1).int().argmax(1)


def patch_box(model: ProtoPNet, row: int, column: int) -> Box:
    """Return the rectangle of the picture that a patch at this place of the latent map stands for, in pixels of what
    the network sees."""
    if model.backbone.windows is not None:
        x0, y0, x1, y1 = _window_box(model, row, column)
        return float(x0), float(y0), float(x1), float(y1)
    layer, backbone = model.prototype_layer, model.backbone
    return cell_box(row, column, backbone.map_size, layer.window, backbone.input_size)


def cell_box(row: int, column: int, map_hw: tuple[int, int], window: tuple[int, int], size_hw: tuple[int, int]) -> Box:
    """Return the rectangle of the picture that a prototype's window covers at this place of the latent map."""
    step_y, step_x = size_hw[0] / map_hw[0], size_hw[1] / map_hw[1]
    return column * step_x, row * step_y, (column + window[1]) * step_x, (row + window[0]) * step_y


def _window_box(model: ProtoPNet, row: Place, column: Place) -> tuple[Place, Place, Place, Place]:
    """Around all windows of the patch that begins at this place."""
    windows, (h, w) = model.backbone.windows, model.prototype_layer.window
    assert windows is not None
    y0, x0 = row * windows.stride, column * windows.stride
    return x0, y0, x0 + (w - 1) * windows.stride + windows.size, y0 + (h - 1) * windows.stride + windows.size


def whole_map(backbone: Backbone, map_PHW: Tensor) -> Tensor:
    """Return the map as it lies in the picture. Of the windows over a place, the one with the largest value counts."""
    if backbone.windows is not None:
        return _best_window(backbone, backbone.windows, map_PHW)
    return map_PHW


def _best_window(backbone: Backbone, windows: Windows, map_PHW: Tensor) -> Tensor:
    """Return the largest value of the windows over each place."""
    for axis, side in zip((1, 2), backbone.input_size, strict=True):
        cells = map_PHW.shape[axis]
        extent = side - (cells - 1) * windows.stride  # of a patch, which may have several windows
        middle_n = (torch.arange(min(PLACES, side), device=map_PHW.device) + 0.5) * side / min(PLACES, side)
        first_c = torch.arange(cells, device=map_PHW.device)[:, None] * windows.stride
        covers_cn = (middle_n >= first_c) & (middle_n < first_c + extent)
        line_PHc1 = map_PHW.movedim(axis, 2)[..., None]
        map_PHW = line_PHc1.masked_fill(~covers_cn, -torch.inf).amax(2).movedim(2, axis)
    return map_PHW
