"""Augmentation of a whole batch at once, on whatever device it lies: one warp, a fresh draw for every picture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.config.settings import AugmentConfig
from likethat.data.cells import Cells, tiles
from likethat.data.warps import draw_warps, uniform
from likethat.runtime import send

ERASED_AREA = (0.02, 0.2)  # share of the picture that a hole covers
PIECE_AREA = (0.0, 0.5)  # share of the picture that a piece of another covers


@dataclass(frozen=True)
class Views:
    """What is drawn for each picture of a batch; drawn on the CPU, so that it is the same on every device."""

    warp_B33: Tensor
    bend_B2GG: Tensor
    factor_B3: Tensor  # of brightness, contrast and saturation
    hole_B4: Tensor  # y and x of its centre, half its height and width, in [-1, 1]
    piece_B4: Tensor  # likewise; what the batch's picture before shows there

    def to(self, device: torch.device) -> Views:
        return Views(*(send(value, device) for value in vars(self).values()))

    def __getitem__(self, index_b: Tensor) -> Views:
        return Views(*(value[index_b] for value in vars(self).values()))


def draw_views(batch: int, aspect: float, config: AugmentConfig, generator: torch.Generator) -> Views:
    warp_B33, bend_B2GG = draw_warps(batch, aspect, config, generator)
    factor_B3 = 1 + uniform((batch, 3), config.jitter, generator)
    hole_B4 = _draw_rectangles(batch, config.erase, ERASED_AREA, generator)
    piece_B4 = _draw_rectangles(batch, config.cutmix, PIECE_AREA, generator)
    piece_B4[:, :2] *= 1 - piece_B4[:, 2:]  # wholly inside the picture
    return Views(warp_B33, bend_B2GG, factor_B3, hole_B4, piece_B4)


def show(x_B3HW: Tensor, views: Views) -> Tensor:
    """Warp, recolour and pierce each picture, and cover a part of some with a piece of another.

    All warps are one sampling grid, so pixels are interpolated once. Corners are filled by reflection, not black.
    """
    place = tiles((x_B3HW.shape[2], x_B3HW.shape[3])).coordinates(x_B3HW.device)
    grid_BHW2 = _sampling_grid(views.warp_B33, views.bend_B2GG, *place)
    x_B3HW = F.grid_sample(x_B3HW, grid_BHW2, mode="bilinear", padding_mode="reflection", align_corners=False)
    x_B3HW = recolour(x_B3HW, views.factor_B3)
    x_B3HW = x_B3HW.masked_fill(_inside(views.hole_B4, *place)[:, None], 0.5)
    return torch.where(_inside(views.piece_B4, *place)[:, None], x_B3HW.roll(1, 0), x_B3HW)


def of_shown(value_B: Tensor, views: Views) -> Tensor:
    """Return what is known of each image (its number, its label) for the one or two that each view shows: B, 2."""
    pieced_B = views.piece_B4[:, 2] > 0
    return torch.stack([value_B, torch.where(pieced_B, value_B.roll(1), value_B)], 1)


def shown_shares(views: Views) -> Tensor:
    """Return the shares of each view that show its picture and the piece of another: B, 2."""
    piece_B = views.piece_B4[:, 2:].prod(1)
    return torch.stack([1 - piece_B, piece_B], 1)


def looked_at(views: Views, cells: Cells) -> Tensor:
    """Return where in its picture each cell of a view looks, pieces aside: B, H, W, 2 (x, y)."""
    return _sampling_grid(views.warp_B33, views.bend_B2GG, *cells.coordinates(views.warp_B33.device))


def in_piece(views: Views, cells: Cells) -> Tensor:
    """Return which cells of a view look at the piece of another picture: B, H, W."""
    return _inside(views.piece_B4, *cells.coordinates(views.piece_B4.device))


def same_pixels(piece_B4: Tensor, cells: Cells, margin: float) -> Tensor:
    """Return which cells look at the same pixels in a view and in the one before it, of which it has a piece: B, H, W.

    `margin` cells around them show the same pixels, too.
    """
    y_HW, x_HW = cells.coordinates(piece_B4.device)
    reach_y, reach_x = (half + margin * step for half, step in zip(cells.half, cells.step, strict=True))
    y_B11, x_B11, half_y_B11, half_x_B11 = piece_B4[:, :, None, None].unbind(1)
    away_y_BHW, away_x_BHW = (y_HW - y_B11).abs(), (x_HW - x_B11).abs()
    inside_BHW = (away_y_BHW + reach_y <= half_y_B11) & (away_x_BHW + reach_x <= half_x_B11)
    outside_BHW = (away_y_BHW - reach_y >= half_y_B11) | (away_x_BHW - reach_x >= half_x_B11)
    return inside_BHW & outside_BHW.roll(1, 0)


def _sampling_grid(warp_B33: Tensor, bend_B2GG: Tensor, y_HW: Tensor, x_HW: Tensor) -> Tensor:
    """Return where in the source these places of a view are read, in [-1, 1], as B, H, W, 2."""
    warped_B3HW = torch.einsum("bij,jhw->bihw", warp_B33, torch.stack([x_HW, y_HW, torch.ones_like(x_HW)]))
    bent_B2HW = F.interpolate(bend_B2GG, tuple(y_HW.shape), mode="bicubic", align_corners=True)
    return (warped_B3HW[:, :2] / warped_B3HW[:, 2:] + bent_B2HW).permute(0, 2, 3, 1)


def recolour(x_B3HW: Tensor, factor_B3: Tensor) -> Tensor:
    """Multiply brightness, contrast and saturation by a factor near 1 each."""
    brightness, contrast, saturation = factor_B3[:, :, None, None, None].unbind(1)
    x_B3HW = x_B3HW * brightness
    mean_B111 = x_B3HW.mean((1, 2, 3), keepdim=True)
    x_B3HW = mean_B111 + (x_B3HW - mean_B111) * contrast
    gray_B1HW = x_B3HW.mean(1, keepdim=True)
    return (gray_B1HW + (x_B3HW - gray_B1HW) * saturation).clamp(0, 1)


def _draw_rectangles(batch: int, chance: float, area: tuple[float, float], generator: torch.Generator) -> Tensor:
    """Draw the centre and half sides of a rectangle; its size is zero where the picture is to have none."""
    low, high = area
    area_B = low + (high - low) * torch.rand(batch, generator=generator)
    stretch_B = torch.exp(uniform(batch, 0.7, generator))
    half_B2 = torch.stack([(area_B * stretch_B).sqrt(), (area_B / stretch_B).sqrt()], 1)
    centre_B2 = uniform((batch, 2), 1.0, generator)
    half_B2 = half_B2 * (torch.rand(batch, generator=generator) < chance)[:, None]
    return torch.cat([centre_B2, half_B2], 1)


def _inside(rectangle_B4: Tensor, y_HW: Tensor, x_HW: Tensor) -> Tensor:
    """Return which of these places lie in each picture's rectangle, as B, H, W."""
    y_B11, x_B11, half_y_B11, half_x_B11 = rectangle_B4[:, :, None, None].unbind(1)
    return ((y_HW - y_B11).abs() < half_y_B11) & ((x_HW - x_B11).abs() < half_x_B11)
