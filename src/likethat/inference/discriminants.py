"""Linear discriminant analysis of patches: the directions of features that best tell which part of which class a patch
shows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.data.loaders import Images
from likethat.distributed import all_reduce_sum
from likethat.inference.feature_maps import FeatureMaps, own_features_of
from likethat.inference.moments import at_places
from likethat.models.backbone import Backbone
from likethat.runtime import send, wide

SHRINKAGE = 0.1  # of the mean variance within classes, added to the variance of every channel
CLASSES = 256  # whose means are in memory at a time, besides the sums
ROUNDING = 1e-9  # of the mean square of features: what differs by less is the same
REST = 0.1  # of the covariance within classes that counts as if it were between them


@dataclass(frozen=True)
class Scatter:
    """Mean of patches, their covariance within a part of a class, and that between the means of these."""

    mean_C: Tensor
    within_CC: Tensor
    between_CC: Tensor


def part_scatter(backbone: Backbone, images: Images | FeatureMaps, place_Nm: Tensor, shown_Nm: Tensor) -> Scatter:
    """Pass once over the images, of which only the patches count that lie at these places and show their part."""
    channels, classes, parts = backbone.channels, int(images.label_N.max()) + 1, place_Nm.shape[1]
    total_KmC = wide(torch.zeros(classes, parts, channels, device=images.device))
    count_Km = wide(torch.zeros(classes, parts, device=images.device))
    product_CC = wide(torch.zeros(channels, channels, device=images.device))
    for index_B, feature_BCHW, label_B in own_features_of(backbone, images):
        here_B = send(index_B, images.device)
        patch_BmC = wide(at_places(feature_BCHW, place_Nm[here_B]) * shown_Nm[here_B][..., None])
        class_BK = wide(F.one_hot(label_B, classes))
        total_KmC += torch.einsum("bk,bmc->kmc", class_BK, patch_BmC)
        count_Km += class_BK.T @ wide(shown_Nm[here_B])
        product_CC += patch_BmC.flatten(0, 1).T @ patch_BmC.flatten(0, 1)
    return scatter_of(*(all_reduce_sum(value.cpu()) for value in (total_KmC, count_Km, product_CC)))


def scatter_of(total_KmC: Tensor, count_Km: Tensor, product_CC: Tensor) -> Scatter:
    """Return the covariances that follow from the sums of patches by class and part, and of their outer products."""
    patches = count_Km.sum().clamp(min=1)
    mean_C, own_CC, between_CC = total_KmC.sum((0, 1)) / patches, *torch.zeros(2, *product_CC.shape).to(product_CC)
    for total_kmC, count_km in zip(total_KmC.split(CLASSES), count_Km.split(CLASSES), strict=True):
        root_km1, mean_kmC = (count_km / patches).sqrt()[..., None], total_kmC / count_km.clamp(min=1)[..., None]
        own_XC, apart_XC = ((root_km1 * value).flatten(0, 1) for value in (mean_kmC, mean_kmC - mean_C))
        own_CC, between_CC = own_CC + own_XC.T @ own_XC, between_CC + apart_XC.T @ apart_XC
    return Scatter(mean_C, product_CC / patches - own_CC, between_CC)


def discriminants(scatter: Scatter, width: int) -> tuple[Tensor, Tensor]:
    """Return weight, D x C, and bias of the directions in which the means of classes and parts lie apart most, compared
    with the patches about these means. Each counts by the share of its variance that lies between the means.

    Few classes differ in fewer directions than are asked for. The rest are those in which patches vary most. They count
    little, and keep patches that are alike in what classes differ in from being all the same.
    """
    identity_CC = torch.eye(len(scatter.mean_C), dtype=scatter.mean_C.dtype)
    # Nothing varies within classes where each shows its parts once, and nothing at all where features are constant.
    square = float(scatter.mean_C.square().mean()) + float(scatter.between_CC.diagonal().mean())
    variance = (scatter.within_CC + 1e-6 * scatter.between_CC).diagonal().mean().clamp(min=ROUNDING * square + 1e-30)
    root_CC = torch.linalg.cholesky(scatter.within_CC + SHRINKAGE * variance * identity_CC)
    whitening_CC = torch.linalg.solve_triangular(root_CC, identity_CC, upper=False)
    apart_CC = scatter.between_CC + REST * scatter.within_CC
    value_C, vector_CC = torch.linalg.eigh(whitening_CC @ apart_CC @ whitening_CC.T)
    value_D = value_C[-width:].clamp(min=0)
    share_D = value_D / (value_D + 1)
    weight_DC = share_D.sqrt()[:, None] * (vector_CC[:, -width:].T @ whitening_CC)
    return weight_DC, -(weight_DC @ scatter.mean_C)
