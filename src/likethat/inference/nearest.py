"""The latent patches nearest to every prototype, found in one pass over the images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from likethat.data.loaders import Images
from likethat.distributed import gather_nearest
from likethat.inference.passes import own_batches_of
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Advance

ALL = slice(None)


@dataclass(frozen=True)
class NearestPatches:
    """Of each prototype the k images that come nearest to it, nearest first, each by its nearest patch."""

    distance_Pk: Tensor  # squared L2, as the prototype layer gives it
    image_Pk: Tensor  # number of the image
    row_Pk: Tensor  # place in the grid of patches
    column_Pk: Tensor
    map_PkHW: Tensor  # distances of all patches of that image


class Search:
    """Keeps the k nearest images of every prototype while batches go by, so memory does not grow with the images."""

    def __init__(self, model: ProtoPNet, k: int) -> None:
        layer = model.prototype_layer
        self.grid = model.patch_grid
        # Infinite distances give way to those of any image.
        self.distance_Pk = layer.prototype_PDhw.new_full((len(layer.class_P), k), float("inf"))
        self.image_Pk = torch.full_like(self.distance_Pk, -1, dtype=torch.long)
        self.map_PkS = self.distance_Pk[..., None].repeat(1, 1, self.grid[0] * self.grid[1])

    def offer(self, index_B: Tensor, distance_BPHW: Tensor, rows: slice = ALL) -> None:
        """Merge in some images, as seen by all prototypes or by those of `rows`. Images offered earlier win ties."""
        k = self.distance_Pk.shape[1]
        map_PBS = distance_BPHW.flatten(2).transpose(0, 1)
        both = torch.cat([self.distance_Pk[rows], map_PBS.amin(2)], 1)
        order_Pk = both.argsort(dim=1, stable=True)[:, :k]
        image_PB = index_B.to(self.image_Pk).expand(len(both), -1)
        # Maps are large; only those that stay are copied.
        old_Pk1, new_Pk1 = order_Pk.clamp(max=k - 1)[..., None], (order_Pk - k).clamp(min=0)[..., None]
        places = self.map_PkS.shape[2]
        old_PkS = self.map_PkS[rows].gather(1, old_Pk1.expand(-1, -1, places))
        new_PkS = map_PBS.gather(1, new_Pk1.expand(-1, -1, places))
        self.map_PkS[rows] = torch.where((order_Pk < k)[..., None], old_PkS, new_PkS)
        self.image_Pk[rows] = torch.cat([self.image_Pk[rows], image_PB], 1).gather(1, order_Pk)
        self.distance_Pk[rows] = both.gather(1, order_Pk)

    def found(self) -> NearestPatches:
        """Return what was found: all images, if fewer than k; where several processes searched, earlier ranks were
        offered earlier images."""
        joined = gather_nearest(self.distance_Pk, self.image_Pk, self.map_PkS)
        self.distance_Pk, self.image_Pk, self.map_PkS = joined
        count = int((self.image_Pk[0] >= 0).sum())
        map_PkS = self.map_PkS[:, :count]
        place_Pk = map_PkS.argmin(2)  # the first of equals
        return NearestPatches(
            self.distance_Pk[:, :count],
            self.image_Pk[:, :count],
            place_Pk // self.grid[1],
            place_Pk % self.grid[1],
            map_PkS.unflatten(2, self.grid),
        )


@torch.no_grad()
def nearest_patches(model: ProtoPNet, images: Images, k: int, advance: Advance | None = None) -> NearestPatches:
    """Search unaugmented images of any class, in evaluation mode and fp32. Ties go to the earlier image, and within an
    image to the earlier place (row by row)."""
    model.eval()
    search = Search(model, k)
    for index_B, x_B3HW, _ in own_batches_of(images, advance):
        for rows, maps in model.prototype_layer.in_blocks(model.latent(x_B3HW)):
            search.offer(index_B, maps.distances(), rows)
    return search.found()
