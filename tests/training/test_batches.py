"""What is known of the cells of a view: the parts they show, and whether the view before shows the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.config.settings import AugmentConfig
from likethat.data.cells import Cells, tiles
from likethat.data.loaders import Images
from likethat.training.batches import FreshViews, Shown

IMAGES, SIDE, CELLS = 32, 112, 7
QUIET = AugmentConfig(jitter=0.0, erase=0.0, noise=0.0, cutmix=1.0)


def with_bright_spots() -> tuple[Images, Tensor]:
    """Black pictures with a white square each, and where its middle is, from -1 to 1."""
    generator = torch.Generator().manual_seed(0)
    pixel_NHW3 = torch.zeros(IMAGES, SIDE, SIDE, 3, dtype=torch.uint8)
    middle_N2 = torch.randint(16, SIDE - 16, (IMAGES, 2), generator=generator)
    for n, (y, x) in enumerate(middle_N2.tolist()):
        pixel_NHW3[n, y - 5 : y + 5, x - 5 : x + 5] = 255
    images = Images(pixel_NHW3, torch.arange(IMAGES) % 4, torch.device("cpu"))
    return images, (middle_N2.flip(1) / (SIDE / 2) - 1)[:, None]


def mean_by_cell(value_BHW: Tensor) -> Tensor:
    return F.avg_pool2d(value_BHW[:, None], SIDE // CELLS)[:, 0]


@pytest.fixture
def shown() -> Shown:
    images, place_N12 = with_bright_spots()
    source = FreshViews(images, QUIET, tiles((CELLS, CELLS)), place_N12)
    return source.show(*source.gather(torch.arange(IMAGES), 3))


def test_parts_are_found_where_views_show_them(shown: Shown) -> None:
    light_BHW = mean_by_cell(shown.x_B3HW.mean(1))
    on_part_BHW = shown.part_BVmHW[:, :, 0].any(1)
    assert shown.part_BVmHW[:, 0].any()
    assert shown.part_BVmHW[:, 1].any(), "no piece shows the part of its own picture"
    assert float((light_BHW * on_part_BHW).sum() / light_BHW.sum()) > 0.85
    assert float(on_part_BHW.float().mean()) < 0.2


def test_cells_that_show_the_same_pixels_do(shown: Shown) -> None:
    differs_BHW = mean_by_cell((shown.x_B3HW - shown.x_B3HW.roll(1, 0)).abs().amax(1))
    assert shown.same_BHW.any()
    assert float((differs_BHW * shown.same_BHW).max()) == 0
    assert float(differs_BHW.max()) > 0.1


def test_places_of_cells() -> None:
    x, y = tiles((2, 4)).places(torch.tensor([[0, 5]])).unbind(-1)
    assert x.tolist() == [[-0.75, -0.25]]
    assert y.tolist() == [[-0.5, 0.5]]
    windows = Cells((7, 7), (224, 224), extent=80, stride=24)
    assert windows.places(torch.tensor(8)).tolist() == pytest.approx([(24 + 40) / 112 - 1] * 2)


def test_objects_are_found_where_views_show_them() -> None:
    """The object of each picture is its bright half, left or right; pieces come from pictures with the other half."""
    pixel_NHW3 = torch.zeros(IMAGES, SIDE, SIDE, 3, dtype=torch.uint8)
    on_NHW = torch.zeros(IMAGES, CELLS, CELLS, dtype=torch.bool)
    for n in range(IMAGES):
        pixels, cells = (slice(0, 48), slice(0, 3)) if n % 2 else (slice(64, None), slice(4, None))
        pixel_NHW3[n, :, pixels] = 255
        on_NHW[n, :, cells] = True
    images = Images(pixel_NHW3, torch.arange(IMAGES) % 4, torch.device("cpu"))
    source = FreshViews(images, QUIET, tiles((CELLS, CELLS)), None, on_NHW)
    shown = source.show(*source.gather(torch.arange(IMAGES), 3))
    light_BHW, on_BHW = mean_by_cell(shown.x_B3HW.mean(1)), shown.on_BVHW.any(1)
    assert shown.on_BVHW[:, 0].any()
    assert shown.on_BVHW[:, 1].any(), "no piece shows an object"
    assert float(light_BHW[on_BHW].mean()) > 0.85
    assert float(light_BHW[~on_BHW].mean()) < 0.15
