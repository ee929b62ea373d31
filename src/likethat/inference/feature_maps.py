"""Feature maps: what a backbone makes of pictures, computed when they are asked for or kept from before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from likethat.data.loaders import Images
from likethat.distributed import any_process, gather_rows, local_world_size
from likethat.inference.passes import own_batches_of
from likethat.models.backbone import Backbone
from likethat.progress import Advance
from likethat.runtime import physical_memory, send

MEMORY_SHARE = 0.25  # of the machine's memory that maps may take where they can be computed again
GPU_SHARE = 0.25  # of the free GPU memory that maps may take


@dataclass(frozen=True)
class FeatureMaps:
    """Maps of a backbone that has already run; on the device where they fit there, or else in the CPU's memory."""

    map_NCHW: Tensor
    label_N: Tensor  # on the device
    device: torch.device

    def __len__(self) -> int:
        return len(self.label_N)

    def batch(self, index_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return some maps and their labels, on the device."""
        map_BCHW = self.map_NCHW[send(index_B, self.map_NCHW.device)]
        return send(map_BCHW, self.device), self.label_N[send(index_B, self.device)]

    def select(self, keep_N: Tensor) -> FeatureMaps:
        """Return the maps of these images only."""
        return FeatureMaps(self.map_NCHW[keep_N.to(self.map_NCHW.device)], self.label_N[keep_N], self.device)


def maps_if_they_fit(backbone: Backbone, images: Images, advance: Advance | None = None) -> Images | FeatureMaps:
    """Return the maps of all images, computed once, or the images where memory is too small for their maps."""
    height, width = backbone.map_size
    size = 4 * len(images) * backbone.channels * height * width
    # Each process keeps all maps. All go the same way, since they share the work.
    if any_process(size > MEMORY_SHARE * physical_memory() / local_world_size()):
        return images
    return keep_feature_maps(backbone.eval(), images, torch.arange(len(images)), advance)


@torch.no_grad()
def keep_feature_maps(
    backbone: Backbone, images: Images, keep_N: Tensor, advance: Advance | None = None
) -> FeatureMaps:
    """Run the backbone, which is in evaluation mode, once over these images."""
    chosen = Images(images.pixel_NHW3[keep_N.to(images.pixel_NHW3.device)], images.label_N[keep_N], images.device)
    shape = (len(chosen), *backbone.map_size, backbone.channels)
    map_NHWC = torch.zeros(shape, device=_place_for(4 * math.prod(shape), images.device))
    map_NCHW = map_NHWC.permute(0, 3, 1, 2)  # in memory as convolutions leave them
    for index_B, feature_BCHW, _ in own_features_of(backbone, chosen, advance):
        map_NCHW[send(index_B, map_NCHW.device)] = feature_BCHW.to(map_NCHW.device)
    gather_rows(map_NHWC)
    return FeatureMaps(map_NCHW, chosen.label_N, images.device)


def _place_for(size: int, device: torch.device) -> torch.device:
    """Return the device if it is a GPU with room for so many bytes, on every process, or else the CPU, whose memory is
    larger."""
    fits = device.type == "cuda" and size < GPU_SHARE * torch.cuda.mem_get_info(device)[0]
    return torch.device("cpu") if any_process(not fits) else device


def own_features_of(
    backbone: Backbone, images: Images | FeatureMaps, advance: Advance | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield numbers, feature maps and labels of the images that this process sees to, batch by batch."""
    if isinstance(images, FeatureMaps):
        yield from own_batches_of(images, advance)
        return
    for index_B, x_B3HW, label_B in own_batches_of(images, advance):
        yield index_B, backbone(x_B3HW), label_B


def features_of(backbone: Backbone, images: Images | FeatureMaps, index_B: Tensor) -> Tensor:
    """Return the feature maps of some images, B x C x H x W."""
    found, _ = images.batch(index_B)
    return found if isinstance(images, FeatureMaps) else backbone(found)
