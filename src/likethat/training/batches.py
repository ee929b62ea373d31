"""The batches that steps learn from: views of training images, drawn anew in every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from likethat.config import AugmentConfig
from likethat.data.augment import Views, draw_views, of_shown, show, shown_shares
from likethat.data.loaders import Images, to_unit
from likethat.distributed import own_shard, world_size
from likethat.runtime import send

# Pictures, and for the V images that each of them shows: labels, shares of the picture, and numbers.
Shown = tuple[Tensor, ...]


@dataclass(frozen=True)
class FreshViews:
    """Views of pictures, drawn anew in every step."""

    images: Images
    config: AugmentConfig

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
        if world_size() > 1:
            part = own_shard(len(index_B))
            own_b = torch.arange(part.start - 1, part.stop) % len(index_B)
            index_B, views = index_B[own_b], views[own_b]
        views = views.to(self.device)
        return [*self.images.raw_batch(index_B), send(index_B, self.device), *vars(views).values()]

    def show(self, *gathered: Tensor) -> Shown:
        """Return the views of what was gathered."""
        pixel_BHW3, label_B, image_B, *drawn = gathered
        views = Views(*drawn)
        x_B3HW = show(to_unit(pixel_BHW3.permute(0, 3, 1, 2)), views)
        shown = (x_B3HW, of_shown(label_B, views), shown_shares(views), of_shown(image_B, views))
        return shown if world_size() == 1 else tuple(value[1:] for value in shown)
