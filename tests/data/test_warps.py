"""The published warps against the same done slowly: a picture of its own coordinates, turned, cropped, scaled back."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from likethat.config.presets import resolve
from likethat.data.augment import draw_views, looked_at
from likethat.data.cells import tiles

SIDE = 224
TILES = 28  # along a side, where it is counted how much of a picture a view shows
SHOWN = {"rotate": 0.824, "skew": 0.957, "shear": 0.940}  # mean share of the tiles, of views that the authors made
PAPER = replace(resolve("paper").augment, flip=0.0)
STILL = replace(PAPER, rotation=0, skew=0, shear=0)
ALONE = {
    "rotate": replace(STILL, rotation=PAPER.rotation),
    "skew": replace(STILL, skew=PAPER.skew),
    "shear": replace(STILL, shear=PAPER.shear),
}
IDLE = {"rotate": 1 / 16, "skew": 0.0, "shear": 1 / 11}  # share of the whole degrees to either side that is none


@pytest.mark.parametrize("kind", SHOWN)
def test_views_show_as_much_of_a_picture_as_the_authors_do(kind: str) -> None:
    views = draw_views(3000, 1.0, ALONE[kind], torch.Generator().manual_seed(0))
    changed_B = (views.warp_B33 != torch.eye(3)).flatten(1).any(1)
    assert float(changed_B.float().mean()) == pytest.approx((1 - IDLE[kind]) / 3, abs=0.03), "kinds are as frequent"
    place_BHW2 = looked_at(views[changed_B.nonzero()[:400, 0]], tiles((SIDE, SIDE)))
    assert place_BHW2.abs().max() <= 1, "nothing lies outside, so nothing is filled in"
    tile_BHW2 = ((place_BHW2 + 1) / 2 * TILES).long()
    tile_BS = (tile_BHW2[..., 0] * TILES + tile_BHW2[..., 1]).flatten(1)
    share_B = torch.zeros(len(tile_BS), TILES**2).scatter_(1, tile_BS, 1.0).mean(1)
    mean = IDLE[kind] + (1 - IDLE[kind]) * float(share_B.mean())
    assert mean == pytest.approx(SHOWN[kind], abs=0.02)


def kind_of(matrix_33: np.ndarray) -> str:
    """Tell the kind of a warp by its matrix."""
    if np.abs(matrix_33[2, :2]).max() > 1e-6:
        return "skew"
    return "rotate" if matrix_33[0, 1] * matrix_33[1, 0] != 0 else "shear"


def coordinates(height: int, width: int) -> list[Image.Image]:
    """Return two pictures whose pixels are their own x and y, in pixels."""
    y_HW, x_HW = np.mgrid[:height, :width].astype(np.float32) + 0.5
    return [Image.fromarray(x_HW), Image.fromarray(y_HW)]


def rotate_slowly(picture: Image.Image, degrees: float) -> Image.Image:
    turned = picture.rotate(degrees, expand=True, resample=Image.Resampling.BICUBIC)
    steep = math.tan(math.radians(abs(degrees)))
    left = steep * (turned.height - turned.width * steep)
    top = steep * (turned.width - left)
    box = (left, top, turned.width - left, turned.height - top)
    return turned.crop(tuple(map(round, box))).resize(picture.size, Image.Resampling.BICUBIC)  # type: ignore[arg-type]


def shear_slowly(picture: Image.Image, slope: float, along_x: bool) -> Image.Image:
    """Push rows (or columns) aside on a wider canvas, and cut off the columns (rows) that some rows do not reach."""
    width, height = picture.size
    shift = round(abs(slope) * (height if along_x else width))
    start = shift if slope > 0 else 0
    if along_x:
        size, rows, box = (width + shift, height), (1, slope, -start, 0, 1, 0), (shift, 0, width, height)
    else:
        size, rows, box = (width, height + shift), (1, 0, 0, slope, 1, -start), (0, shift, width, height)
    pushed = picture.transform(size, Image.Transform.AFFINE, rows, Image.Resampling.BICUBIC)
    return pushed.crop(box).resize(picture.size, Image.Resampling.BICUBIC)


def assert_same_view(place_HW2: torch.Tensor, expected: list[Image.Image]) -> None:
    """The slow version rounds to whole pixels, so that it may be off by some of them, more so near the rim."""
    inner = slice(8, -8)
    for axis, picture in enumerate(expected):
        pixel_HW = (place_HW2[..., axis].numpy() + 1) / 2 * picture.size[axis]
        assert np.abs(pixel_HW - np.asarray(picture))[inner, inner].max() < 2.5


@pytest.mark.parametrize(("height", "width"), [(SIDE, SIDE), (160, SIDE)])
def test_each_view_is_what_the_slow_version_makes(height: int, width: int) -> None:
    views = draw_views(60, height / width, PAPER, torch.Generator().manual_seed(0))
    place_BHW2 = looked_at(views, tiles((height, width)))
    corners, pictures, moved_most = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]), coordinates(height, width), 0.0
    for matrix_33, place_HW2 in zip(views.warp_B33.double().numpy(), place_BHW2, strict=True):
        kind = kind_of(matrix_33)
        if kind == "rotate":
            # Its columns are those of a rotation, each scaled.
            degrees = math.degrees(math.atan2(matrix_33[1, 0] * height / width, matrix_33[0, 0]))
            assert abs(degrees) <= 15 + 1e-4
            assert degrees == pytest.approx(round(degrees), abs=1e-4)
            assert_same_view(place_HW2, [rotate_slowly(picture, degrees) for picture in pictures])
        elif kind == "shear":
            along_x = matrix_33[0, 1] != 0
            slope = matrix_33[0, 1] * width / height if along_x else matrix_33[1, 0] * height / width
            assert abs(slope) <= math.tan(math.radians(10)) + 1e-6
            assert_same_view(place_HW2, [shear_slowly(picture, slope, along_x) for picture in pictures])
        else:
            # Where the picture's corners come to lie around the view: one, or both of a side, outside it.
            moved_43 = np.concatenate([corners, np.ones((4, 1))], 1) @ np.linalg.inv(matrix_33).T
            moved_42 = (moved_43[:, :2] / moved_43[:, 2:] - corners) * corners * [width / 2, height / 2]
            amounts = moved_42[moved_42 > 1e-3]
            assert len(amounts) in (1, 2)
            assert np.ptp(amounts) < 1e-2
            assert np.abs(moved_42[moved_42 <= 1e-3]).max() < 1e-2
            if len(amounts) == 2:  # the ends of one side move along it
                (one, axis), (other, same_axis) = np.argwhere(moved_42 > 1e-3)
                assert axis == same_axis
                assert corners[one][1 - axis] == corners[other][1 - axis]
            moved_most = max(moved_most, float(amounts.max()))
    assert 0.8 * 0.2 * SIDE < moved_most <= 0.2 * SIDE + 1e-2, "a fifth of the longer side at most"
