"""Decoded pictures in memory and the batches made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from likethat.config.settings import AugmentConfig
from likethat.data.augment import Views, draw_views, show
from likethat.data.dataset import Sample
from likethat.runtime import send

GPU_SHARE = 0.5  # of the free GPU memory that pictures may take
VIEW_PIXELS = 256 * 224 * 224  # of pictures whose views are made together: warping takes several times their memory


@dataclass
class Images:
    """The pictures of one part, already resized, as bytes; on the device when they fit there."""

    pixel_NHW3: Tensor
    label_N: Tensor
    device: torch.device

    def __len__(self) -> int:
        return len(self.label_N)

    def image_of(self, row_B: Tensor) -> Tensor:
        """Return the numbers of the pictures that are in these rows."""
        return row_B

    def batch(self, index_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return pictures in [0, 1] as B, 3, H, W and their labels, on the device."""
        pixel_BHW3, label_B = self.raw_batch(index_B)
        return to_unit(pixel_BHW3.permute(0, 3, 1, 2)), label_B

    def raw_batch(self, index_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return pictures as bytes and their labels, on the device."""
        image_B = self.image_of(index_B)
        if self.pixel_NHW3.device == self.device:
            pixel_BHW3 = self.pixel_NHW3[send(image_B, self.device)]
        else:
            pixel_BHW3 = send(self.pixel_NHW3[image_B.cpu()], self.device)
        return pixel_BHW3, self.label_N[send(index_B, self.device)]


@dataclass
class ViewedImages(Images):
    """A few views of every picture, always the same. View v of picture i is row v * pictures + i."""

    views: Views  # on the device, so that a batch waits for nothing

    def image_of(self, row_B: Tensor) -> Tensor:
        return row_B % len(self.pixel_NHW3)

    def batch(self, index_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return views in [0, 1] as B, 3, H, W and their labels, on the device: large ones are made a few at a time."""
        at_once = max(1, VIEW_PIXELS // self.pixel_NHW3[0, ..., 0].numel())
        made = [self._views(index_b) for index_b in index_B.split(at_once)]
        x_B3HW, label_B = (torch.cat(values) if len(made) > 1 else values[0] for values in zip(*made, strict=True))
        return x_B3HW, label_B

    def _views(self, index_B: Tensor) -> tuple[Tensor, Tensor]:
        x_B3HW, label_B = super().batch(index_B)
        return show(x_B3HW, self.views[send(index_B, self.device)]), label_B


def views_of(images: Images, config: AugmentConfig, seed: int, count: int = 1) -> ViewedImages:
    height, width = images.pixel_NHW3.shape[1:3]
    config = replace(config, cutmix=0.0)  # a view of one picture
    views = draw_views(count * len(images), height / width, config, torch.Generator().manual_seed(seed))
    return ViewedImages(images.pixel_NHW3, images.label_N.repeat(count), images.device, views.to(images.device))


def to_unit(pixels: Tensor) -> Tensor:
    """Return bytes as numbers in [0, 1], which networks take, in the layout that they come in."""
    return pixels.float() / 255


def hold(pixel_NHW3: np.ndarray, samples: tuple[Sample, ...], device: torch.device) -> Images:
    pixels = torch.from_numpy(pixel_NHW3)
    label_N = torch.tensor([sample.label for sample in samples], device=device)
    fits = device.type != "cuda" or pixels.nbytes < GPU_SHARE * torch.cuda.mem_get_info(device)[0]
    return Images(pixels.to(device) if fits else pixels, label_N, device)


def image_weights(samples: Sequence[Sample], *, balance: bool) -> Tensor | None:
    """Return how much each image counts in training, 1 on average: what the data says, and with `balance` as much for
    every class together. None where all count alike."""
    weight_N = torch.tensor([sample.weight for sample in samples], dtype=torch.float64)
    if balance:
        label_N = torch.tensor([sample.label for sample in samples])
        weight_N = weight_N / label_N.bincount(weight_N)[label_N]
    weight_N = weight_N / weight_N.mean()
    return None if torch.allclose(weight_N, torch.ones_like(weight_N)) else weight_N


def training_batches(count: int, batch_size: int, views: int, seed: int, weight_N: Tensor | None = None) -> Tensor:
    """Return a new order of the images for each view, one batch a row.

    No image is left out, and all batches are of one size, at most `batch_size`: the last is filled up from the first.
    With weights, an image comes as often as its weight says, rounded up or down: in as many steps, heavy ones come
    several times and light ones in some epochs only.
    """
    generator = torch.Generator().manual_seed(seed)
    order_N = torch.cat([_order(count, weight_N, generator) for _ in range(views)])
    batches = -(-len(order_N) // batch_size)
    size = -(-len(order_N) // batches)
    return order_N[torch.arange(batches * size) % len(order_N)].view(batches, size)


def _order(count: int, weight_N: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return as many images as there are, in a random order."""
    order_N = torch.randperm(count, generator=generator)
    if weight_N is None:
        return order_N
    # Systematic sampling: steps of 1 along the weights laid end to end.
    end_N = weight_N[order_N].cumsum(0)
    step_N = torch.arange(count, dtype=torch.float64) + torch.rand((), generator=generator, dtype=torch.float64)
    drawn_N = order_N[torch.searchsorted(end_N, step_N, right=True).clamp(max=count - 1)]
    return drawn_N[torch.randperm(count, generator=generator)]
