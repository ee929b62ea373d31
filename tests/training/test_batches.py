"""What is known of the cells of a view: the parts they show, and whether the view before shows the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.config import AugmentConfig
from likethat.data.cells import tiles
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


def looked_at(value_BHW: Tensor, offset: float) -> Tensor:
    """The mean over what each cell looks at: its own square, or the one half a cell above and to the left."""
    cell = SIDE // CELLS
    if offset:
        value_BHW = F.pad(value_BHW, (cell // 2, 0, cell // 2, 0))[:, :SIDE, :SIDE]
    return F.avg_pool2d(value_BHW[:, None], cell)[:, 0]


def shown_with(offset: float) -> Shown:
    images, place_N12 = with_bright_spots()
    source = FreshViews(images, QUIET, tiles((CELLS, CELLS), (offset, offset)), place_N12)
    return source.show(*source.gather(torch.arange(IMAGES), 3))


@pytest.mark.parametrize("offset", [0.0, -0.5])
def test_parts_are_found_where_views_show_them(offset: float) -> None:
    shown = shown_with(offset)
    light_BHW = looked_at(shown.x_B3HW.mean(1), offset)
    on_part_BHW = shown.part_BVmHW[:, :, 0].any(1)
    assert shown.part_BVmHW[:, 0].any()
    assert shown.part_BVmHW[:, 1].any(), "no piece shows the part of its own picture"
    assert float((light_BHW * on_part_BHW).sum() / light_BHW.sum()) > 0.85
    assert float(on_part_BHW.float().mean()) < 0.2


@pytest.mark.parametrize("offset", [0.0, -0.5])
def test_cells_that_show_the_same_pixels_do(offset: float) -> None:
    shown = shown_with(offset)
    differs_BHW = looked_at((shown.x_B3HW - shown.x_B3HW.roll(1, 0)).abs().amax(1), offset)
    assert shown.same_BHW.any()
    assert float((differs_BHW * shown.same_BHW).max()) == 0
    assert float(differs_BHW.max()) > 0.1


def test_places_of_cells() -> None:
    cells = tiles((2, 4), (0.0, 0.5))
    x, y = cells.places(torch.tensor([[0, 5]])).unbind(-1)
    assert x.tolist() == [[-0.5, 0.0]]
    assert y.tolist() == [[-0.5, 0.5]]
