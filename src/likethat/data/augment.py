"""Augmentation of a whole batch at once, on whatever device it lies: one warp, a fresh draw for every picture."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.config import AugmentConfig

GRID = 4  # control points of the elastic distortion along each side


def augment(x_B3HW: Tensor, config: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Rotates, skews, shears or bends each picture (one of them, as the published recipe) and perhaps flips it.

    All of it is one sampling grid, so pixels are interpolated once. Corners are filled by reflection, not black.
    Random numbers come from a CPU generator: the draw is the same on every device.
    """
    batch, _, height, width = x_B3HW.shape
    kinds = 4 if config.distortion else 3
    kind_B = torch.randint(kinds, (batch,), generator=generator)
    rotated_B33 = _rotation(_uniform(batch, config.rotation, generator), height / width)
    skewed_B33 = _skew(batch, config.skew, generator)
    sheared_B33 = _shear(batch, config.shear, generator)
    warp_B33 = torch.stack([rotated_B33, skewed_B33, sheared_B33, torch.eye(3).expand(batch, 3, 3)])[
        kind_B, torch.arange(batch)
    ]
    flip_B = torch.rand(batch, generator=generator) < config.flip
    warp_B33 = warp_B33 * torch.where(flip_B, -1.0, 1.0)[:, None, None] ** torch.tensor([1.0, 0.0, 0.0])
    bend_B2GG = _uniform((batch, 2, GRID, GRID), config.distortion, generator) * 2 * (kind_B == 3)[:, None, None, None]
    device = x_B3HW.device
    return F.grid_sample(
        x_B3HW,
        _sampling_grid(warp_B33.to(device), bend_B2GG.to(device), height, width),
        mode="bilinear",
        padding_mode="reflection",
        align_corners=False,
    )


def _uniform(shape: int | tuple[int, ...], limit: float, generator: torch.Generator) -> Tensor:
    shape = (shape,) if isinstance(shape, int) else shape
    return (2 * torch.rand(shape, generator=generator) - 1) * limit


def _rotation(degrees_B: Tensor, aspect: float) -> Tensor:
    """Rotation in pixels: the sampling grid runs from -1 to 1 along both sides, whatever their lengths."""
    angle_B = degrees_B * math.pi / 180
    cos_B, sin_B = angle_B.cos(), angle_B.sin()
    matrix_B33 = torch.zeros(len(degrees_B), 3, 3)
    matrix_B33[:, 0, 0], matrix_B33[:, 0, 1] = cos_B, -sin_B * aspect
    matrix_B33[:, 1, 0], matrix_B33[:, 1, 1] = sin_B / aspect, cos_B
    matrix_B33[:, 2, 2] = 1
    return matrix_B33


def _shear(batch: int, limit: float, generator: torch.Generator) -> Tensor:
    """Along x or along y, as a coin says."""
    slope_B = torch.tan(_uniform(batch, limit, generator) * math.pi / 180)
    along_x_B = torch.rand(batch, generator=generator) < 0.5
    matrix_B33 = torch.eye(3).repeat(batch, 1, 1)
    matrix_B33[:, 0, 1] = slope_B * along_x_B
    matrix_B33[:, 1, 0] = slope_B * ~along_x_B
    return matrix_B33


def _skew(batch: int, limit: float, generator: torch.Generator) -> Tensor:
    """The homography that takes the picture's corners to corners moved inwards by up to `limit` of a side."""
    corner_42 = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])
    moved_B42 = corner_42 * (1 - 2 * limit * torch.rand(batch, 4, 2, generator=generator))
    # Eight equations in the eight unknowns of a homography with a last entry of 1.
    x_B4, y_B4 = corner_42[:, 0].expand(batch, 4), corner_42[:, 1].expand(batch, 4)
    u_B4, v_B4 = moved_B42[..., 0], moved_B42[..., 1]
    one_B4, nil_B4 = torch.ones_like(x_B4), torch.zeros_like(x_B4)
    row_u_B48 = torch.stack([x_B4, y_B4, one_B4, nil_B4, nil_B4, nil_B4, -u_B4 * x_B4, -u_B4 * y_B4], -1)
    row_v_B48 = torch.stack([nil_B4, nil_B4, nil_B4, x_B4, y_B4, one_B4, -v_B4 * x_B4, -v_B4 * y_B4], -1)
    solution_B8 = torch.linalg.solve(torch.cat([row_u_B48, row_v_B48], 1), torch.cat([u_B4, v_B4], 1))
    return torch.cat([solution_B8, torch.ones(batch, 1)], 1).view(batch, 3, 3)


def _sampling_grid(warp_B33: Tensor, bend_B2GG: Tensor, height: int, width: int) -> Tensor:
    """Where in the source each output pixel is read, in [-1, 1], as B, H, W, 2."""
    device = warp_B33.device
    x_W = (torch.arange(width, device=device) * 2 + 1) / width - 1
    y_H = (torch.arange(height, device=device) * 2 + 1) / height - 1
    point_3HW = torch.stack(
        [x_W.expand(height, width), y_H[:, None].expand(height, width), torch.ones(height, width, device=device)]
    )
    warped_B3HW = torch.einsum("bij,jhw->bihw", warp_B33, point_3HW)
    bent_B2HW = F.interpolate(bend_B2GG, (height, width), mode="bicubic", align_corners=True)
    return (warped_B3HW[:, :2] / warped_B3HW[:, 2:] + bent_B2HW).permute(0, 2, 3, 1)
