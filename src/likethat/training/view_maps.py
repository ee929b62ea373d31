"""Feature maps of a frozen backbone for a few views of every training image, computed once (`--warm-views`).

In the warm stage only what lies behind the backbone moves. Its maps stay true as long as it is in evaluation mode:
BatchNorm neither takes statistics from the batch nor learns them, and nothing is dropped. They are float16 wherever
they lie, so that training does not depend on how much memory there is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from likethat.config import Config, TrainConfig
from likethat.data.loaders import Images, views_of
from likethat.distributed import join, own_part, world
from likethat.errors import UserError
from likethat.inference.memory_map import fill_file, gone_afterwards, too_large
from likethat.inference.passes import mixed_precision, own_batches_of
from likethat.models.backbone import Backbone
from likethat.progress import Advance
from likethat.runtime import seed_for, send
from likethat.training.parallel import Shown


@dataclass
class ViewMaps(Images):
    """Maps in the place of pictures, H x W x C. View v of image i is row v * images + i."""

    images: int

    def gather(self, row_B: Tensor, seed: int) -> list[Tensor]:
        """Maps, labels and the numbers of the images. There is nothing to draw."""
        row_B = row_B[own_part(len(row_B))]
        return [*self.raw_batch(row_B), send(row_B % self.images, self.device)]

    def show(self, *gathered: Tensor) -> Shown:
        map_BHWC, label_B, image_B = gathered
        share_B = torch.ones_like(label_B, dtype=torch.float32)
        return map_BHWC.permute(0, 3, 1, 2).float(), label_B[:, None], share_B[:, None], image_B[:, None]


def rows_of_epoch(batches: Tensor, images: int, epoch: int, config: TrainConfig) -> Tensor:
    """The rows of an epoch's batches (`training_batches`, numbers of images). An image's views take turns, so that all
    are seen equally often."""
    time = torch.arange(batches.numel()) % (images * config.views) // images  # how often the epoch has shown the image
    view = (epoch * config.views + time) % config.warm_views
    return view.view_as(batches) * images + batches


@contextlib.contextmanager
def cached_view_maps(
    backbone: Backbone,
    images: Images,
    config: Config,
    file: Path,
    check: Callable[[], None],
    advance: Advance | None = None,
) -> Iterator[ViewMaps]:
    """`file` is made where the maps would take too much memory, and is gone afterwards. `check` may raise to stop; all
    processes call it equally often."""
    views = config.train.warm_views
    shape = (views * len(images), *backbone.map_size, backbone.channels)
    rows = _own_rows(backbone, images, config, check, advance)
    with gone_afterwards(file):
        if too_large(2 * math.prod(shape), images.device):
            map_RHWC = fill_file(file, shape, f"feature maps of --warm-views {views}", rows)
        else:
            map_RHWC = torch.zeros(shape, dtype=torch.float16, device=images.device)
            for first, map_BHWC in rows:
                map_RHWC[first : first + len(map_BHWC)] = map_BHWC
            join(map_RHWC)
        yield ViewMaps(map_RHWC, images.label_N.repeat(views), images.device, len(images))


def warm_view(images: Images, view: int, config: Config) -> Images:
    return views_of(images, config.augment, seed_for(config.train.seed, "warm view", view))


@torch.no_grad()
def _own_rows(
    backbone: Backbone, images: Images, config: Config, check: Callable[[], None], advance: Advance | None
) -> Iterator[tuple[int, Tensor]]:
    """Those that this process sees to."""
    backbone.eval()
    views = config.train.warm_views
    for view in range(views):
        check()
        for index_B, x_B3HW, _ in own_batches_of(warm_view(images, view, config), _from(view, views, advance)):
            with mixed_precision(images.device):
                map_BHWC = backbone(x_B3HW).permute(0, 2, 3, 1).half()
            if not bool(map_BHWC.isfinite().all()):
                raise UserError(
                    f"The feature maps of {backbone.name} have values too large for float16, so that they cannot be "
                    "kept: pass --warm-views 0."
                )
            yield view * len(images) + int(index_B[0]), map_BHWC
            if world() == 1:  # of several, one may have a batch more than another
                check()


def _from(view: int, views: int, advance: Advance | None) -> Advance | None:
    """The progress of one view as a part of all."""
    return advance and (lambda done, of: advance(view * of + done, views * of))
