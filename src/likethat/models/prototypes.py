"""The prototype layer: squared L2 distances between latent patches and prototypes, and similarities made of them.

Shapes, here and everywhere: B batch, C backbone channels, D latent channels, H W map, h w prototype window,
P prototypes, K classes, N images.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON = 1e-4
BLOCK = 2**25  # distances in memory at a time where a pass over many images must not need more: 128 MB


def log_similarity(distance: Tensor) -> Tensor:
    """Return the paper's similarity, log((d + 1) / (d + eps)), which is largest (about 9.21) at d = 0."""
    return torch.log((distance + 1) / (distance + EPSILON))


def linear_similarity(distance: Tensor) -> Tensor:
    return -distance


def cosine_similarity(distance: Tensor) -> Tensor:
    """Return the cosine: on vectors of length 1 the squared L2 distance is 2 - 2 cos. A vector that points elsewhere
    has no similarity at all."""
    return F.relu(1 - distance / 2)


@dataclass(frozen=True)
class Similarity:
    """A decreasing function of the distance; `angular` compares directions, by the product of unit vectors.

    `bfloat16` says whether it may be trained on what a network computes in that. The log similarity may not: it is so
    steep near a distance of 0 that rounding alone takes up to half of it away, and the backbone's is enough for that.
    """

    of_distance: Callable[[Tensor], Tensor]
    angular: bool = False
    bfloat16: bool = True


SIMILARITIES = {
    "log": Similarity(log_similarity, bfloat16=False),
    "linear": Similarity(linear_similarity),
    "cosine": Similarity(cosine_similarity, angular=True),
}


def patches(z_BDHW: Tensor, window: tuple[int, int]) -> Tensor:
    """Return every h x w window of the map as one vector: B, D*h*w, H', W' with H' = H - h + 1, W' = W - w + 1."""
    if window == (1, 1):
        return z_BDHW
    height, width = z_BDHW.shape[2] - window[0] + 1, z_BDHW.shape[3] - window[1] + 1
    return F.unfold(z_BDHW, window).unflatten(2, (height, width))


def products(patch_BDHW: Tensor, vector_PD: Tensor) -> Tensor:
    """Return <patch, vector> for all pairs as B, P, H, W. Vectors B, P, D are others for each image.

    It is one product of two matrices where maps lie in memory channels last, which gives one that does too."""
    patch_BHWD = patch_BDHW.permute(0, 2, 3, 1)
    if vector_PD.ndim == 3:
        product_BHWP = (patch_BHWD.flatten(1, 2) @ vector_PD.mT).unflatten(1, patch_BHWD.shape[1:3])
    else:
        product_BHWP = (patch_BHWD.flatten(0, 2) @ vector_PD.T).unflatten(0, patch_BHWD.shape[:3])
    return product_BHWP.permute(0, 3, 1, 2)


def bfloat16_parts(vector_PD: Tensor) -> list[Tensor]:
    """Split fp32 numbers into three of 8 significant bits each: their sum is the number, which has 24."""
    parts: list[Tensor] = []
    for _ in range(3):
        parts.append(vector_PD.bfloat16())
        vector_PD = vector_PD - parts[-1].float()
    return parts


@dataclass
class DistanceMaps:
    """Distances of all patches to all prototypes before the last step. That keeps their order, so that where only the
    smallest are wanted, only they take it."""

    start_BPHW: Tensor
    rest_P: Tensor
    floor: bool  # rounding may leave a squared distance below 0

    def distances(self) -> Tensor:
        return self._finish(self.start_BPHW, self.rest_P[..., None, None])

    def of_pairs(self, image_S: Tensor, prototype_S: Tensor) -> Tensor:
        """Return the distances of some prototypes in some images of the batch: S, H, W."""
        return self._finish(self.start_BPHW[image_S, prototype_S], self.rest_P[prototype_S, None, None])

    def smallest(self) -> Tensor:
        """Return the smallest distance of each prototype over all patches of an image: B, P."""
        return self._finish(self.start_BPHW.flatten(2).amin(2), self.rest_P)

    def _finish(self, start: Tensor, rest: Tensor) -> Tensor:
        return F.relu(start + rest) if self.floor else start + rest


def squared_distances(patch_BDHW: Tensor, prototype_PD: Tensor, centre_D: Tensor | None = None) -> DistanceMaps:
    """Return ||patch - prototype||^2 for all pairs, in fp32 whatever the surrounding autocast. Prototypes B, P, D are
    others for each image.

    Expanding the square makes it one matrix product. Both sides are centred on the mean prototype first (of all of
    them, where only some are given): the expansion's rounding error grows with the vectors' lengths, and the log
    similarity is most sensitive near 0.
    """
    with torch.autocast(patch_BDHW.device.type, enabled=False):
        prototype_PD = prototype_PD.float()
        centre_D = prototype_PD.detach().mean(-2) if centre_D is None else centre_D
        patch_BDHW = patch_BDHW.float() - centre_D[..., None, None]
        prototype_PD = prototype_PD - centre_D[..., None, :]
        product_BPHW = products(patch_BDHW, -2 * prototype_PD)
        patch_norm_B1HW = patch_BDHW.square().sum(1, keepdim=True)
        return DistanceMaps(patch_norm_B1HW + product_BPHW, prototype_PD.square().sum(-1), floor=True)


def angular_distances(patch_BDHW: Tensor, prototype_PD: Tensor) -> DistanceMaps:
    """Return 2 - 2 <patch, prototype> for all pairs, in fp32: the squared distance of unit vectors."""
    with torch.autocast(patch_BDHW.device.type, enabled=False):
        product_BPHW = products(patch_BDHW.float(), -2 * prototype_PD.float())
        return DistanceMaps(product_BPHW, product_BPHW.new_full((len(prototype_PD),), 2.0), floor=False)


def mixed_angular_distances(z_BDHW: Tensor, prototype_PD: Tensor) -> DistanceMaps:
    """Return the same for vectors of any length in bfloat16, on CUDA and without gradients: with the prototypes in
    parts every product is exact and sums are fp32, at the speed of bfloat16."""
    z_BHWD = z_BDHW.permute(0, 2, 3, 1)
    parts_PE = torch.cat(bfloat16_parts(prototype_PD), 1)
    product_SP = torch.mm(z_BHWD.flatten(0, 2).repeat(1, 3), parts_PE.T, out_dtype=torch.float32)
    scale_BHW1 = -2 / z_BHWD.float().norm(dim=3, keepdim=True).clamp(min=1e-12)
    start_BPHW = product_SP.unflatten(0, z_BHWD.shape[:3]).mul_(scale_BHW1).permute(0, 3, 1, 2)
    return DistanceMaps(start_BPHW, start_BPHW.new_full((len(prototype_PD),), 2.0), floor=False)


class PrototypeLayer(nn.Module):
    """Prototypes of shape h x w x D, the class each belongs to, and where they stood before projection."""

    class_P: Tensor
    unprojected_PDhw: Tensor
    __call__: Callable[..., DistanceMaps]  # what `forward` gives; else its type would be lost

    def __init__(
        self, class_of_prototype: list[int], latent_width: int, window: tuple[int, int], similarity: str
    ) -> None:
        super().__init__()
        self.window = window
        self.similarity = SIMILARITIES[similarity]
        shape = (len(class_of_prototype), latent_width, *window)
        self.prototype_PDhw = nn.Parameter(torch.rand(shape))
        self.register_buffer("class_P", torch.tensor(class_of_prototype))
        # Zero until the first projection; kept so that the projection's effect can be bounded afterwards.
        self.register_buffer("unprojected_PDhw", torch.zeros(shape))

    def patches(self, z_BDHW: Tensor) -> Tensor:
        """Return the vectors that prototypes are compared with, and that projection copies."""
        patch_BDHW = patches(z_BDHW.float(), self.window)
        return F.normalize(patch_BDHW, dim=1) if self.similarity.angular else patch_BDHW

    def vectors(self) -> Tensor:
        """Return prototypes as the vectors they are compared as: P, D*h*w, none longer than a patch can be."""
        vector_PD = self.prototype_PDhw.flatten(1)
        return vector_PD / vector_PD.norm(dim=1, keepdim=True).clamp(min=1) if self.similarity.angular else vector_PD

    def with_prototypes(
        self, vector_PD: Tensor, class_P: Tensor, unprojected_PD: Tensor | None = None
    ) -> PrototypeLayer:
        """Return such a layer with other prototypes; without `unprojected_PD`, projection has not moved them."""
        layer = copy.deepcopy(self)
        shape = (len(vector_PD), *self.prototype_PDhw.shape[1:])
        before_PD = vector_PD if unprojected_PD is None else unprojected_PD
        layer.prototype_PDhw = nn.Parameter(vector_PD.detach().view(shape).clone())
        layer.class_P, layer.unprojected_PDhw = class_P, before_PD.detach().view(shape).clone()
        return layer

    def before_projection(self) -> PrototypeLayer:
        """Return the layer with its prototypes as they were before the last projection."""
        return self.with_prototypes(self.unprojected_PDhw.flatten(1), self.class_P)

    def forward(self, z_BDHW: Tensor) -> DistanceMaps:
        vector_PD = self.vectors()
        return self._comparison(z_BDHW, vector_PD)(vector_PD)

    def in_blocks(self, z_BDHW: Tensor, most: int = BLOCK) -> Iterator[tuple[slice, DistanceMaps]]:
        """Yield the same distances for blocks of prototypes, so that at most `most` of them are in memory at a time."""
        vector_PD = self.vectors()
        compare = self._comparison(z_BDHW, vector_PD)
        h, w = self.window
        size = max(1, most // z_BDHW[:, 0, h - 1 :, w - 1 :].numel())
        for first in range(0, len(vector_PD), size):
            rows = slice(first, min(first + size, len(vector_PD)))
            yield rows, compare(vector_PD[rows])

    def _comparison(self, z_BDHW: Tensor, vector_PD: Tensor) -> Callable[[Tensor], DistanceMaps]:
        """Return the function that compares these maps with some of all the vectors."""
        bfloat16 = z_BDHW.is_cuda and z_BDHW.dtype == torch.bfloat16
        if bfloat16 and self.similarity.angular and self.window == (1, 1) and not torch.is_grad_enabled():
            return partial(mixed_angular_distances, z_BDHW)
        patch_BDHW = self.patches(z_BDHW)
        if self.similarity.angular:
            return partial(angular_distances, patch_BDHW)
        return partial(squared_distances, patch_BDHW, centre_D=vector_PD.detach().float().mean(0))
