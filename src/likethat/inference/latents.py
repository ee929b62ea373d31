"""Latent maps of images whose network no longer moves: all that a new prototype needs to be found, cut and scored.

A map is several times smaller than its picture, and the backbone, which is nearly all of the work, has been at it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from likethat.data.loaders import Images
from likethat.inference.passes import batches_of, eval_batch, precision_for, scores_by
from likethat.models.protopnet import ProtoPNet
from likethat.models.prototypes import PrototypeLayer
from likethat.progress import Advance
from likethat.runtime import physical_memory

MEMORY_SHARE = 0.25  # of the machine's memory that the maps of one part may take; beyond it they stay on disk


@dataclass(frozen=True)
class Latents:
    """The maps of one part, in the CPU's memory or in a file; batches go to the device."""

    z_NDHW: Tensor
    label_N: Tensor  # on the device

    def __len__(self) -> int:
        return len(self.z_NDHW)

    def batches(self) -> Iterator[Tensor]:
        """Yield the maps in order, cut as images are, so that the network's prototypes score the same to the bit."""
        device = self.label_N.device
        return (z_BDHW.to(device) for z_BDHW in self.z_NDHW.split(eval_batch(device)))

    def of_images(self, image_B: Tensor) -> Tensor:
        return self.z_NDHW[image_B.cpu()].to(self.label_N.device)


@torch.no_grad()
def cache_latents(model: ProtoPNet, images: Images, file: Path, advance: Advance | None = None) -> Latents:
    """Keep the latent maps of all images, in memory or, where they are too large for it, in `file`."""
    model.eval()
    latent_width = model.prototype_layer.prototype_PDhw.shape[1]
    shape = (len(images), *model.backbone.map_size, latent_width)
    if 4 * math.prod(shape) > MEMORY_SHARE * physical_memory():
        z_NHWD = torch.from_file(str(file), shared=True, size=math.prod(shape)).view(shape)
    else:
        z_NHWD = torch.empty(shape)
    z_NDHW = z_NHWD.permute(0, 3, 1, 2)  # in memory as convolutions leave it, so that what follows rounds alike
    for index_B, x_B3HW, _ in batches_of(images, advance):
        with precision_for(images, model):
            z_NDHW[index_B] = model.latent(x_B3HW).float().cpu()
    return Latents(z_NDHW, images.label_N)


@torch.no_grad()
def score_latents(layer: PrototypeLayer, latents: Latents) -> Tensor:
    """Return the similarity scores of every image, N x P: those of the whole network, where the layer is its own."""
    return torch.cat([scores_by(layer, z_BDHW) for z_BDHW in latents.batches()])
