"""Projection: every prototype becomes the nearest latent training patch of its class that no other one took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.data.loaders import Images
from likethat.distributed import gather_nearest, gather_rows, own_shard
from likethat.errors import UserError
from likethat.inference.feature_maps import FeatureMaps, features_of
from likethat.inference.passes import eval_batch, groups_within
from likethat.models.protopnet import ProtoPNet
from likethat.models.prototypes import squared_distances
from likethat.progress import Advance
from likethat.runtime import send, tf32_convolutions

MOST_BYTES = 2**28  # of candidates in memory at a time
FAR = 1e6  # added to the distance of patches that are off the object


@dataclass(frozen=True)
class Projection:
    """For each prototype: the image it comes from, the place in the latent map, and the L2 distance it moved."""

    image_P: Tensor
    row_P: Tensor
    column_P: Tensor
    moved_P: Tensor


class ClassRows:
    """Images that come class by class, as a table with a row for each of these k classes, and in it a place for every
    image of the class that has most of them."""

    def __init__(self, label_B: Tensor, device: torch.device) -> None:
        """Lay out the table; `label_B` is not on the device, so that nothing waits for that to tell its size."""
        label_k, count_k = label_B.unique_consecutive(return_counts=True)
        first_k = count_k.cumsum(0) - count_k
        row_B = torch.arange(len(label_k)).repeat_interleave(count_k)
        rank_B = torch.arange(len(label_B)) - first_k[row_B]
        self.shape = len(label_k), int(count_k.max())
        self.label_B, self.label_k, self.first_k = (send(value, device) for value in (label_B, label_k, first_k))
        self.row_B, self.rank_B = send(row_B, device), send(rank_B, device)

    def spread(self, value_B: Tensor, empty: float) -> Tensor:
        """Put what each image has into its place of the table."""
        table = value_B.new_full((*self.shape, *value_B.shape[1:]), empty)
        table[self.row_B, self.rank_B] = value_B
        return table

    def found(self, entry_kmc: Tensor, each: int) -> tuple[Tensor, Tensor]:
        """Return the image and which of its entries, given numbers in a row of the table with `each` entries an image.
        Numbers of empty places give some image."""
        image_kmc = self.first_k[:, None, None] + entry_kmc // each
        return image_kmc.clamp(max=len(self.row_B) - 1), entry_kmc % each


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

    def offer(self, label_B: Tensor, patch_BDHW: Tensor, number_BS: Tensor, off_BS: Tensor | None = None) -> None:
        """Merge in the patches of some images, which come class by class; `number_BS` names each patch. The sort is
        stable, so patches offered earlier win ties."""
        rows = ClassRows(label_B - self.first, patch_BDHW.device)
        label_k, label_B = rows.label_k, rows.label_B
        distance_BmS = squared_distances(patch_BDHW, self.vector_KmD[label_B]).distances().flatten(2)
        if off_BS is not None:
            distance_BmS = distance_BmS + FAR * off_BS[:, None]
        distance_BmS = distance_BmS.masked_fill(~self.used_Km[label_B][..., None], float("inf"))
        # Of one image no more patches can stay than are kept of all.
        kept = self.distance_Kmc.shape[2]
        near_BmS, place_BmS = distance_BmS.sort(dim=2, stable=True)
        near_Bmc, place_Bmc = near_BmS[..., :kept], place_BmS[..., :kept]
        new_kmX = rows.spread(near_Bmc, float("inf")).transpose(1, 2).flatten(2)
        both_kmX = torch.cat([self.distance_Kmc[label_k], new_kmX], 2)
        order_kmc = both_kmX.argsort(dim=2, stable=True)[..., :kept]
        image_kmc, slot_kmc = rows.found((order_kmc - kept).clamp(min=0), near_Bmc.shape[2])
        place_kmc = place_Bmc[image_kmc, torch.arange(kept, device=place_Bmc.device)[:, None], slot_kmc]
        is_old_kmc, old_kmc = order_kmc < kept, order_kmc.clamp(max=kept - 1)
        new_kmcD = patch_BDHW.flatten(2).transpose(1, 2)[image_kmc, place_kmc]
        old_kmcD = self.nearest_KmcD[label_k].gather(2, old_kmc[..., None].expand_as(new_kmcD))
        old_number_kmc = self.patch_Kmc[label_k].gather(2, old_kmc)
        self.nearest_KmcD[label_k] = torch.where(is_old_kmc[..., None], old_kmcD, new_kmcD)
        self.patch_Kmc[label_k] = torch.where(is_old_kmc, old_number_kmc, number_BS[image_kmc, place_kmc])
        self.distance_Kmc[label_k] = both_kmX.gather(2, order_kmc)

    def gather(self) -> None:
        """Take the nearest of all processes, each of which was offered a shard, an earlier one earlier patches."""
        found = gather_nearest(self.distance_Kmc, self.patch_Kmc, self.nearest_KmcD)
        self.distance_Kmc, self.patch_Kmc, self.nearest_KmcD = found

    def chosen(self) -> tuple[Tensor, Tensor]:
        """Return the patch that each prototype `number_p` becomes: its number and its vector."""
        chosen_Km = settle(self.distance_Kmc, self.patch_Kmc)
        patch_Km = self.patch_Kmc.gather(2, chosen_Km[..., None])[..., 0]
        width = self.nearest_KmcD.shape[3]
        vector_KmD = self.nearest_KmcD.gather(2, chosen_Km[..., None, None].expand(-1, -1, 1, width))[:, :, 0]
        return patch_Km.flatten()[self.place_p], vector_KmD.flatten(0, 1)[self.place_p]


@torch.no_grad()
def project(
    model: ProtoPNet,
    images: Images,
    classes: tuple[str, ...],
    advance: Advance | None = None,
    on_NHW: Tensor | None = None,
    *,
    is_rough: bool = False,
) -> Projection:
    """Project all prototypes in one pass over the unaugmented training images, in evaluation mode and fp32. Patches off
    the cells of `on_NHW` are taken only where no others are left.

    A projection that others follow may be rough: a GPU compares patches after convolutions in TF32, and then embeds
    those that are taken in fp32. What a prototype becomes is exactly a patch in any case.

    Within a class, the closest pair of prototype and patch is settled first, then the closest pair among the
    prototypes and patches still free, and so on. Ties go to the lower prototype, the earlier image, the earlier
    place in the map (row by row).
    """
    check_enough_patches(model, images, classes)
    model.eval()
    layer = model.prototype_layer
    patch_P, vector_PD = torch.zeros_like(layer.class_P), torch.zeros_like(layer.vectors())
    off_NS = None if on_NHW is None else off_object(on_NHW, layer.window)
    is_rough = is_rough and images.device.type == "cuda"
    with tf32_convolutions() if is_rough else nullcontext():
        for candidates in nearest_of_own_class(model, images, advance, off_NS):
            patch_P[candidates.number_p], vector_PD[candidates.number_p] = candidates.chosen()
    height, width = model.patch_grid
    image_P, place_P = patch_P // (height * width), patch_P % (height * width)
    if is_rough:
        vector_PD = embed(model, images, image_P, place_P)
    moved_P = (vector_PD - layer.vectors()).norm(dim=1)
    layer.unprojected_PDhw.copy_(layer.prototype_PDhw)
    layer.prototype_PDhw.copy_(vector_PD.view_as(layer.prototype_PDhw))
    return Projection(image_P, place_P // width, place_P % width, moved_P)


@torch.no_grad()
def embed(model: ProtoPNet, images: Images | FeatureMaps, image_S: Tensor, place_S: Tensor) -> Tensor:
    """Return the latent vectors of patches, each a place (row by row) in an image: S x D."""
    layer = model.prototype_layer
    image_U, inverse_S = image_S.unique(return_inverse=True)
    vector_SD = layer.vectors().new_zeros(len(image_S), layer.vectors().shape[1])
    size = eval_batch(images.device)
    part = own_shard(len(image_U), size)
    for start in range(part.start, part.stop, size):
        feature_BCHW = features_of(model.backbone, images, image_U[start : start + size])
        patch_BDS = layer.patches(model.add_on(feature_BCHW)).flatten(2)
        here_s = ((inverse_S >= start) & (inverse_S < start + size)).nonzero()[:, 0]
        vector_SD[here_s] = patch_BDS[inverse_S[here_s] - start, :, place_S[here_s]]
    return gather_rows(vector_SD)


def off_object(on_NHW: Tensor, window: tuple[int, int]) -> Tensor:
    """Return which patches have more than half of their cells off the object: N x S."""
    share_NHW = F.avg_pool2d(on_NHW.float()[:, None], window, stride=1)[:, 0]
    return share_NHW.flatten(1) < 0.5


def nearest_of_own_class(
    model: ProtoPNet, images: Images, advance: Advance | None = None, off_NS: Tensor | None = None
) -> Iterator[Candidates]:
    """Yield candidates class by class: a batch meets few classes, and not all candidates are in memory."""
    layer = model.prototype_layer
    label_N = images.label_N.cpu()
    order_N = label_N.argsort(stable=True)
    before_K = label_N.bincount(minlength=model.num_classes).cumsum(0).tolist()
    height, width = model.patch_grid
    place_S = torch.arange(height * width, device=images.device)
    most = int(model.own_KP.sum(1).max())
    size, nbytes = eval_batch(images.device), 4 * most * most * layer.vectors().shape[1]
    for labels in groups_within([nbytes] * model.num_classes, MOST_BYTES):
        candidates = Candidates(model, labels)
        first, end = before_K[labels.start - 1] if labels.start else 0, before_K[labels.stop - 1]
        part = own_shard(end - first, size)
        for start in range(first + part.start, first + part.stop, size):
            index_B = order_N[start : min(start + size, first + part.stop)]
            patch_BDHW = layer.patches(model.latent(images.batch(index_B)[0]))
            number_BS = send(index_B, images.device)[:, None] * len(place_S) + place_S
            off_BS = None if off_NS is None else send(off_NS[index_B.to(off_NS.device)], images.device)
            candidates.offer(label_N[index_B], patch_BDHW, number_BS, off_BS)
            if advance:
                advance(start + len(index_B), len(images))
        candidates.gather()
        yield candidates


def check_enough_patches(model: ProtoPNet, images: Images, classes: tuple[str, ...]) -> None:
    """Check that there is a patch for every prototype."""
    height, width = model.patch_grid
    available_K = images.label_N.bincount(minlength=model.num_classes) * height * width
    for name, available, needed in zip(classes, available_K.tolist(), model.own_KP.sum(1).tolist(), strict=True):
        if available < needed:
            raise UserError(
                f"Class '{name}' has {available} training patches for {needed} prototypes; add images of it or lower "
                "--prototypes-per-class."
            )


def settle(distance_Kmc: Tensor, patch_Kmc: Tensor) -> Tensor:
    """Choose the candidate that each prototype takes (K, m), so that no patch of a class is taken twice: closest pair
    first. Every round settles one prototype of every class."""
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
