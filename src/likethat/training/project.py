"""Projection: every prototype becomes the nearest latent training patch of its class that no other one took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from likethat.data.loaders import Images
from likethat.distributed import join_nearest, own_part
from likethat.errors import UserError
from likethat.models.protopnet import ProtoPNet
from likethat.models.prototypes import squared_distances
from likethat.progress import Advance
from likethat.training.engine import EVAL_BATCH, groups_within

MOST_BYTES = 2**28  # of candidates in memory at a time


@dataclass(frozen=True)
class Projection:
    """For each prototype: the image it comes from, the place in the latent map, and the L2 distance it moved."""

    image_P: Tensor
    row_P: Tensor
    column_P: Tensor
    moved_P: Tensor


class Candidates:
    """The nearest patches of the prototypes of some classes, nearest first, laid out by class (K classes, m prototypes
    of a class at most, m candidates each): enough that one remains for each prototype however the others choose.

    Where a class has fewer prototypes or patches, distances are infinite.
    """

    def __init__(self, model: ProtoPNet, labels: range) -> None:
        class_P, vector_PD = model.prototype_layer.class_P, model.prototype_layer.vectors()
        self.first = labels.start
        self.number_p = ((class_P >= labels.start) & (class_P < labels.stop)).nonzero()[:, 0]
        class_p = class_P[self.number_p] - self.first
        count_K = class_p.bincount(minlength=len(labels))
        most = int(count_K.max())
        # Prototypes lie class by class, so the m-th one of a class is found by counting from the class's first.
        slot_p = torch.arange(len(class_p), device=class_P.device) - (count_K.cumsum(0) - count_K)[class_p]
        self.place_p = class_p * most + slot_p  # in the K*m rows
        self.vector_KmD = vector_PD.new_zeros(len(labels), most, vector_PD.shape[1])
        self.vector_KmD.flatten(0, 1)[self.place_p] = vector_PD[self.number_p]
        self.used_Km = torch.arange(most, device=class_P.device) < count_K[:, None]
        self.distance_Kmc = vector_PD.new_full((len(labels), most, most), float("inf"))
        self.patch_Kmc = torch.full_like(self.distance_Kmc, -1, dtype=torch.long)
        self.nearest_KmcD = vector_PD.new_zeros(len(labels), most, most, vector_PD.shape[1])

    def offer(self, label: int, patch_bDHW: Tensor, number_bS: Tensor) -> None:
        """Merges the patches of some images of one class; `number_bS` names each patch. The sort is stable, so
        patches offered earlier win ties."""
        label -= self.first
        distance_bmHW = squared_distances(patch_bDHW, self.vector_KmD[label]).distances()
        distance_mS = distance_bmHW.flatten(2).transpose(0, 1).flatten(1)
        distance_mS = distance_mS.masked_fill(~self.used_Km[label][:, None], float("inf"))
        both = torch.cat([self.distance_Kmc[label], distance_mS], 1)
        kept = self.distance_Kmc.shape[2]
        order_mc = both.argsort(dim=1, stable=True)[:, :kept]
        number_mS = number_bS.flatten().expand(len(both), -1)
        vector_SD = patch_bDHW.flatten(2).transpose(1, 2).flatten(0, 1)
        is_old_mc1 = (order_mc < kept)[..., None]
        old_mcD = self.nearest_KmcD[label].gather(
            1, order_mc.clamp(max=kept - 1)[..., None].expand(-1, -1, vector_SD.shape[1])
        )
        self.nearest_KmcD[label] = torch.where(is_old_mc1, old_mcD, vector_SD[(order_mc - kept).clamp(min=0)])
        self.patch_Kmc[label] = torch.cat([self.patch_Kmc[label], number_mS], 1).gather(1, order_mc)
        self.distance_Kmc[label] = both.gather(1, order_mc)

    def join(self) -> None:
        """Of several processes that were offered one part each, an earlier one earlier patches."""
        found = join_nearest(self.distance_Kmc, self.patch_Kmc, self.nearest_KmcD)
        self.distance_Kmc, self.patch_Kmc, self.nearest_KmcD = found

    def chosen(self) -> tuple[Tensor, Tensor]:
        """Of each prototype `number_p` the patch that it becomes: its number and its vector."""
        chosen_Km = settle(self.distance_Kmc, self.patch_Kmc)
        patch_Km = self.patch_Kmc.gather(2, chosen_Km[..., None])[..., 0]
        width = self.nearest_KmcD.shape[3]
        vector_KmD = self.nearest_KmcD.gather(2, chosen_Km[..., None, None].expand(-1, -1, 1, width))[:, :, 0]
        return patch_Km.flatten()[self.place_p], vector_KmD.flatten(0, 1)[self.place_p]


@torch.no_grad()
def project(model: ProtoPNet, images: Images, classes: tuple[str, ...], advance: Advance | None = None) -> Projection:
    """One pass over the unaugmented training images, in evaluation mode and fp32.

    Within a class, the closest pair of prototype and patch is settled first, then the closest pair among the
    prototypes and patches still free, and so on. Ties go to the lower prototype, the earlier image, the earlier
    place in the map (row by row).
    """
    check_enough_patches(model, images, classes)
    model.eval()
    layer = model.prototype_layer
    patch_P, vector_PD = torch.zeros_like(layer.class_P), torch.zeros_like(layer.vectors())
    for candidates in nearest_of_own_class(model, images, advance):
        patch_P[candidates.number_p], vector_PD[candidates.number_p] = candidates.chosen()
    moved_P = (vector_PD - layer.vectors()).norm(dim=1)
    layer.unprojected_PDhw.copy_(layer.prototype_PDhw)
    layer.prototype_PDhw.copy_(vector_PD.view_as(layer.prototype_PDhw))
    height, width = model.patch_grid
    place_P = patch_P % (height * width)
    return Projection(patch_P // (height * width), place_P // width, place_P % width, moved_P)


def nearest_of_own_class(model: ProtoPNet, images: Images, advance: Advance | None = None) -> Iterator[Candidates]:
    """Images go class by class, so that a batch meets few classes, and candidates need not be kept of all of them."""
    layer = model.prototype_layer
    order_N = images.label_N.argsort(stable=True)
    before_K = images.label_N.bincount(minlength=model.num_classes).cumsum(0).tolist()
    height, width = model.patch_grid
    place_S = torch.arange(height * width, device=images.device)
    most = int(model.own_KP.sum(1).max())
    size = 4 * most * most * layer.vectors().shape[1]
    for labels in groups_within([size] * model.num_classes, MOST_BYTES):
        candidates = Candidates(model, labels)
        first, end = before_K[labels.start - 1] if labels.start else 0, before_K[labels.stop - 1]
        part = own_part(end - first, EVAL_BATCH)
        for start in range(first + part.start, first + part.stop, EVAL_BATCH):
            index_B = order_N[start : min(start + EVAL_BATCH, first + part.stop)]
            x_B3HW, label_B = images.batch(index_B)
            patch_BDHW = layer.patches(model.latent(x_B3HW))
            for label in label_B.unique_consecutive().tolist():
                here = label_B == label
                candidates.offer(label, patch_BDHW[here], index_B[here][:, None] * len(place_S) + place_S)
            if advance:
                advance(start + len(index_B), len(images))
        candidates.join()
        yield candidates


def check_enough_patches(model: ProtoPNet, images: Images, classes: tuple[str, ...]) -> None:
    """Every prototype needs a patch of its own."""
    height, width = model.patch_grid
    available_K = images.label_N.bincount(minlength=model.num_classes) * height * width
    for name, available, needed in zip(classes, available_K.tolist(), model.own_KP.sum(1).tolist(), strict=True):
        if available < needed:
            raise UserError(
                f"Class '{name}' has {available} training patches for {needed} prototypes; add images of it or lower "
                "--prototypes-per-class."
            )


def settle(distance_Kmc: Tensor, patch_Kmc: Tensor) -> Tensor:
    """Which candidate each prototype takes (K, m), so that no patch of a class is taken twice: closest pair first.
    Every round settles one prototype of every class."""
    distance_Kmc = distance_Kmc.clone()
    classes, most, kept = distance_Kmc.shape
    label_K = torch.arange(classes, device=distance_Kmc.device)
    chosen_Km = torch.zeros(classes, most, dtype=torch.long, device=distance_Kmc.device)
    open_Km = torch.ones_like(chosen_Km, dtype=torch.bool)
    for _ in range(most):
        pair_K = distance_Kmc.flatten(1).argmin(1)
        row_K, column_K = pair_K // kept, pair_K % kept
        # A class with fewer prototypes has only infinite pairs left; its settled rows must not change.
        fresh_K = open_Km[label_K, row_K] & distance_Kmc[label_K, row_K, column_K].isfinite()
        chosen_Km[label_K, row_K] = torch.where(fresh_K, column_K, chosen_Km[label_K, row_K])
        open_Km[label_K, row_K] = open_Km[label_K, row_K] & ~fresh_K
        taken_K11 = patch_Kmc[label_K, row_K, column_K][:, None, None]
        distance_Kmc.masked_fill_((patch_Kmc == taken_K11) & fresh_K[:, None, None], float("inf"))
        distance_Kmc[label_K, row_K] = float("inf")
    return chosen_Km
