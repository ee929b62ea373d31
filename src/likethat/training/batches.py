"""The batches that steps learn from: views of training images, drawn anew in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from likethat.config.settings import AugmentConfig
from likethat.data.augment import Views, draw_views, in_piece, looked_at, of_shown, same_pixels, show, shown_shares
from likethat.data.cells import Cells
from likethat.data.loaders import Images, to_unit
from likethat.distributed import own_shard, world_size
from likethat.runtime import send

RADIUS = 24 / 112  # of a part around its place, where a picture goes from -1 to 1
NOTHING = torch.empty(0)
MARGIN = 1.0  # cells around those that show the same pixels in two views that must show the same, too


class Shown(NamedTuple):
    """What a step learns from: pictures, and what is known of the V training images that each shows.

    Before a part of a batch there may be one more picture, the one before it, of which nothing is known.
    """

    x_B3HW: Tensor
    label_BV: Tensor
    share_BV: Tensor  # of the picture
    image_BV: Tensor  # their numbers
    turn_B: Tensor  # the picture's place in the batch
    same_BHW: Tensor  # cells of the map that show the same pixels as in the picture before
    part_BVmHW: Tensor  # cells that show the m-th part of the image
    on_BVHW: Tensor = NOTHING  # cells that show the masked or boxed object of the image, where it is known

    def own(self, value_BDHW: Tensor) -> Tensor:
        """Return maps or pictures without that of the picture before."""
        return value_BDHW if len(value_BDHW) == len(self.label_BV) else value_BDHW[1:]


@dataclass(frozen=True)
class FreshViews:
    """Views of pictures, drawn anew in every step."""

    images: Images
    config: AugmentConfig
    cells: Cells
    middle_Nm2: Tensor | None = None  # of the parts in each image, NaN where it does not show one
    on_NHW: Tensor | None = None  # cells of each image that show its object

    @property
    def device(self) -> torch.device:
        return self.images.device

    def gather(self, index_B: Tensor, seed: int) -> list[Tensor]:
        """Return all that this process's slice of a batch is made of, on the device.

        Every process draws the views of the whole batch. It takes its slice and the picture before, of which the
        first of the slice may show a piece.
        """
        height, width = self.images.pixel_NHW3.shape[1:3]
        views = draw_views(len(index_B), height / width, self.config, torch.Generator().manual_seed(seed))
        noise_B3HW = self._draw_noise(len(index_B), (height, width), seed)
        turn_B = torch.arange(len(index_B))
        if world_size() > 1:
            part = own_shard(len(index_B))
            turn_B = torch.arange(part.start - 1, part.stop) % len(index_B)
            index_B, views, noise_B3HW = index_B[turn_B], views[turn_B], noise_B3HW[send(turn_B, self.device)]
        views = views.to(self.device)
        image_B = send(index_B, self.device)
        middle_Bm2 = (
            torch.zeros(len(image_B), 0, 2, device=self.device) if self.middle_Nm2 is None else self.middle_Nm2[image_B]
        )
        on_BHW = torch.zeros(len(image_B), 0, 0, device=self.device) if self.on_NHW is None else self.on_NHW[image_B]
        known = (image_B, send(turn_B, self.device), middle_Bm2, on_BHW)
        return [*self.images.raw_batch(index_B), *known, noise_B3HW, *vars(views).values()]

    def _draw_noise(self, batch: int, size_hw: tuple[int, int], seed: int) -> Tensor:
        """Return noise for each picture, of a strength of its own; none at all where none is asked for."""
        if not self.config.noise:
            return torch.zeros(batch, 1, 1, 1, device=self.device)
        generator = torch.Generator(self.device).manual_seed(seed)
        level_B111 = self.config.noise * torch.rand(batch, 1, 1, 1, generator=generator, device=self.device)
        return level_B111 * torch.randn(batch, 3, *size_hw, generator=generator, device=self.device)

    def show(self, *gathered: Tensor) -> Shown:
        """Return the views of what was gathered."""
        pixel_BHW3, label_B, image_B, turn_B, middle_Bm2, on_BHW, noise_B3HW, *drawn = gathered
        views = Views(*drawn)
        x_B3HW = show(to_unit(pixel_BHW3.permute(0, 3, 1, 2)), views) + noise_B3HW
        same_BHW = same_pixels(views.piece_B4, self.cells, MARGIN)
        known = (of_shown(label_B, views), shown_shares(views), of_shown(image_B, views), turn_B)
        shown = Shown(x_B3HW, *known, same_BHW, self._parts(middle_Bm2, views), self._objects(on_BHW, views))
        if world_size() == 1:
            return shown
        same_BHW[1] = False  # the picture before is no part of the slice
        return Shown(*(value[1:] for value in shown))

    def _parts(self, middle_Bm2: Tensor, views: Views) -> Tensor:
        """Return which cells show each part of the image and of the one that a piece is of: B, V, m, H, W."""
        away_BmHW2 = (looked_at(views, self.cells)[:, None] - middle_Bm2[:, :, None, None]).abs()
        near_BmHW, piece_B1HW = (away_BmHW2 <= RADIUS).all(-1), in_piece(views, self.cells)[:, None]
        return torch.stack([near_BmHW & ~piece_B1HW, near_BmHW.roll(1, 0) & piece_B1HW], 1)

    def _objects(self, on_BHW: Tensor, views: Views) -> Tensor:
        """Return which cells show the object of the image and of the one that a piece is of: B, V, H, W."""
        if not on_BHW.numel():
            return on_BHW[:, None].bool()
        height, width = on_BHW.shape[1:]
        x_BHW, y_BHW = looked_at(views, self.cells).unbind(-1)
        inside_BHW = (x_BHW.abs() <= 1) & (y_BHW.abs() <= 1)
        column_BHW = ((x_BHW + 1) / 2 * width).long().clamp(0, width - 1)
        row_BHW = ((y_BHW + 1) / 2 * height).long().clamp(0, height - 1)
        seen_BHW = on_BHW.flatten(1).gather(1, (row_BHW * width + column_BHW).flatten(1)).view_as(inside_BHW)
        seen_BHW, piece_BHW = seen_BHW.bool() & inside_BHW, in_piece(views, self.cells)
        return torch.stack([seen_BHW & ~piece_BHW, seen_BHW.roll(1, 0) & piece_BHW], 1)
