"""Warps of a batch of pictures: a homography and an elastic displacement for each, which say where a view is read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from likethat.config.settings import AugmentConfig

GRID = 4  # control points of the elastic distortion along each side
CORNERS = ((-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0))  # of a picture: x and y
ONE_SIDE = 0.75  # share of the published skews that tilt the picture to one of its sides; the others move one corner


def draw_warps(batch: int, aspect: float, config: AugmentConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a homography and an elastic displacement for each picture: all kinds of warps together (`compose`), or one
    kind a picture, as published. `aspect` is the height of the pictures, divided by their width."""
    warp_B33, bend_B2GG = (_compose if config.compose else _take_one)(batch, aspect, config, generator)
    if config.zoom < 1:
        warp_B33 = _zoom(batch, config.zoom, generator) @ warp_B33
    sign_B = torch.where(torch.rand(batch, generator=generator) < config.flip, -1.0, 1.0)
    mirror_B33 = torch.eye(3).repeat(batch, 1, 1)
    mirror_B33[:, 0, 0] = sign_B
    return warp_B33 @ mirror_B33, bend_B2GG


def _compose(batch: int, aspect: float, config: AugmentConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    rotated_B33 = _rotation(uniform(batch, config.rotation, generator), aspect)
    skewed_B33 = _skew(batch, config.skew, generator)
    sheared_B33 = _shear(batch, config.shear, generator)
    bend_B2GG = uniform((batch, 2, GRID, GRID), 2 * config.distortion, generator)
    return rotated_B33 @ skewed_B33 @ sheared_B33, bend_B2GG


def _take_one(batch: int, aspect: float, config: AugmentConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Warp as the library does that the authors used: after each warp the view is the part of the picture that has no
    empty corners, scaled back to the picture's size. Each kind has the same chance."""
    kinds = [
        _cropped_rotation(_whole_degrees(batch, config.rotation, generator), aspect),
        _tilt(batch, config.skew, aspect, generator),
        _cropped_shear(_whole_degrees(batch, config.shear, generator), aspect, generator),
    ]
    bend_B2GG = uniform((batch, 2, GRID, GRID), 2 * config.distortion, generator)
    if config.distortion:
        kinds.append(torch.eye(3).expand(batch, 3, 3))
    kind_B = torch.randint(len(kinds), (batch,), generator=generator)
    return torch.stack(kinds)[kind_B, torch.arange(batch)], bend_B2GG * (kind_B == 3)[:, None, None, None]


def uniform(shape: int | tuple[int, ...], limit: float, generator: torch.Generator) -> Tensor:
    """Draw numbers between -limit and limit."""
    shape = (shape,) if isinstance(shape, int) else shape
    return (2 * torch.rand(shape, generator=generator) - 1) * limit


def _whole_degrees(batch: int, limit: float, generator: torch.Generator) -> Tensor:
    """Draw whole degrees to either side, none included: so the library counts."""
    most = math.floor(limit)
    return uniform(batch, most + 1, generator).trunc().clamp(-most, most)


def _rotation(degrees_B: Tensor, aspect: float) -> Tensor:
    """Return rotations in pixels: the sampling grid runs from -1 to 1 along both sides, whatever their lengths."""
    angle_B = degrees_B * math.pi / 180
    cos_B, sin_B = angle_B.cos(), angle_B.sin()
    matrix_B33 = torch.zeros(len(degrees_B), 3, 3)
    matrix_B33[:, 0, 0], matrix_B33[:, 0, 1] = cos_B, -sin_B * aspect
    matrix_B33[:, 1, 0], matrix_B33[:, 1, 1] = sin_B / aspect, cos_B
    matrix_B33[:, 2, 2] = 1
    return matrix_B33


def _cropped_rotation(degrees_B: Tensor, aspect: float) -> Tensor:
    """Return rotations that show a rectangle inside the turned picture.

    The rectangle is the library's, which is nearly the largest one: its formula lacks a division.
    """
    angle_B = degrees_B.abs() * math.pi / 180
    sin_B, tan_B = angle_B.sin(), angle_B.tan()
    width_B = angle_B.cos() + aspect * sin_B  # of the turned picture's bounds, where the picture's own width is 1
    height_B = aspect * angle_B.cos() + sin_B
    left_B = tan_B * (height_B - width_B * tan_B)  # from the bounds to the rectangle
    top_B = tan_B * (width_B - left_B)
    rectangle_B33 = torch.eye(3).repeat(len(degrees_B), 1, 1)
    rectangle_B33[:, 0, 0] = width_B - 2 * left_B
    rectangle_B33[:, 1, 1] = (height_B - 2 * top_B) / aspect
    return _rotation(degrees_B, aspect) @ rectangle_B33


def _shear(batch: int, limit: float, generator: torch.Generator) -> Tensor:
    """Draw shears along x or along y, with equal chance."""
    slope_B = torch.tan(uniform(batch, limit, generator) * math.pi / 180)
    along_x_B = torch.rand(batch, generator=generator) < 0.5
    matrix_B33 = torch.eye(3).repeat(batch, 1, 1)
    matrix_B33[:, 0, 1] = slope_B * along_x_B
    matrix_B33[:, 1, 0] = slope_B * ~along_x_B
    return matrix_B33


def _cropped_shear(degrees_B: Tensor, aspect: float, generator: torch.Generator) -> Tensor:
    """Draw whether to shear along x or y; show as much of the width, or height, as lies inside in all rows, or
    columns."""
    slope_B = torch.tan(degrees_B * math.pi / 180)
    along_x_B = torch.rand(len(degrees_B), generator=generator) < 0.5
    x_B, y_B = slope_B * along_x_B * aspect, slope_B * ~along_x_B / aspect
    matrix_B33 = torch.eye(3).repeat(len(degrees_B), 1, 1)
    matrix_B33[:, 0, 0], matrix_B33[:, 0, 1] = 1 - x_B.abs(), x_B
    matrix_B33[:, 1, 0], matrix_B33[:, 1, 1] = y_B, 1 - y_B.abs()
    return matrix_B33


def _zoom(batch: int, smallest: float, generator: torch.Generator) -> Tensor:
    """Draw zooms that show a part of the picture, `smallest` of its sides or more, somewhere inside it."""
    scale_B = torch.exp(torch.rand(batch, generator=generator) * math.log(smallest))
    matrix_B33 = torch.eye(3).repeat(batch, 1, 1)
    matrix_B33[:, 0, 0] = matrix_B33[:, 1, 1] = scale_B
    matrix_B33[:, :2, 2] = uniform((batch, 2), 1.0, generator) * (1 - scale_B)[:, None]
    return matrix_B33


def _skew(batch: int, limit: float, generator: torch.Generator) -> Tensor:
    """Draw homographies that take the picture's corners to corners moved inwards by up to `limit` of a side."""
    corner_42 = torch.tensor(CORNERS)
    moved_B42 = corner_42 * (1 - 2 * limit * torch.rand(batch, 4, 2, generator=generator))
    return _homography(corner_42.expand(batch, 4, 2), moved_B42)


def _tilt(batch: int, limit: float, aspect: float, generator: torch.Generator) -> Tensor:
    """Draw homographies that bring one side of the picture nearer, so that both its ends leave the view, or one corner,
    along x or y. They leave it by up to `limit` of the longer side."""
    corner_42 = torch.tensor(CORNERS)
    move_842 = torch.eye(8).view(8, 4, 2) * corner_42  # of each corner, along x and along y
    side_442 = move_842[[1, 3, 0, 4]] + move_842[[7, 5, 2, 6]]  # left, right, upper, lower
    chance_12 = torch.tensor([ONE_SIDE / 4] * 4 + [(1 - ONE_SIDE) / 8] * 8)
    kind_B = torch.multinomial(chance_12, batch, replacement=True, generator=generator)
    longer_2 = torch.tensor([max(1.0, aspect), max(1.0, 1 / aspect)])  # side, in widths and in heights
    amount_B1 = 2 * limit * torch.rand(batch, 1, generator=generator)
    moved_B42 = corner_42 + torch.cat([side_442, move_842])[kind_B] * (amount_B1 * longer_2)[:, None]
    return _homography(moved_B42, corner_42.expand(batch, 4, 2))


def _homography(from_B42: Tensor, to_B42: Tensor) -> Tensor:
    """Return the homographies that take four points to four others: eight equations in the eight unknowns of a matrix
    with a last entry of 1."""
    x_B4, y_B4 = from_B42.unbind(-1)
    u_B4, v_B4 = to_B42.unbind(-1)
    one_B4, nil_B4 = torch.ones_like(x_B4), torch.zeros_like(x_B4)
    row_u_B48 = torch.stack([x_B4, y_B4, one_B4, nil_B4, nil_B4, nil_B4, -u_B4 * x_B4, -u_B4 * y_B4], -1)
    row_v_B48 = torch.stack([nil_B4, nil_B4, nil_B4, x_B4, y_B4, one_B4, -v_B4 * x_B4, -v_B4 * y_B4], -1)
    solution_B8 = torch.linalg.solve(torch.cat([row_u_B48, row_v_B48], 1), torch.cat([u_B4, v_B4], 1))
    return torch.cat([solution_B8, torch.ones(len(solution_B8), 1)], 1).view(-1, 3, 3)
