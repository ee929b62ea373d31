"""Mean and covariance of a backbone's features, and the principal components that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from likethat.data.loaders import Images
from likethat.distributed import all_reduce_sum, gather_rows
from likethat.inference.feature_maps import FeatureMaps, own_features_of
from likethat.models.backbone import Backbone
from likethat.runtime import send, wide

STRIDE = 37  # cells by which the sampled ones move on from image to image; prime to the usual numbers of cells


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of all features, and some of the features themselves."""

    mean_C: Tensor
    covariance_CC: Tensor
    sample_SC: Tensor


def feature_moments(backbone: Backbone, images: Images | FeatureMaps, each: int) -> Moments:
    """Pass once over the images, and keep `each` features of every one."""
    places, channels = backbone.map_size[0] * backbone.map_size[1], backbone.channels
    spread_e = torch.arange(each, device=images.device) * places // max(1, each)
    sample_NeC = torch.zeros(len(images), each, channels, device=images.device)
    total_C = wide(torch.zeros(channels, device=images.device))
    seen, product_CC = 0, wide(torch.zeros(channels, channels, device=images.device))
    for index_B, feature_BCHW, _ in own_features_of(backbone, images):
        here_B = send(index_B, images.device)
        sample_NeC[here_B] = at_places(feature_BCHW, (here_B[:, None] * STRIDE + spread_e) % places)
        flat_SC = feature_BCHW.flatten(2).mT.flatten(0, 1)
        seen += len(flat_SC)
        total_C = total_C + wide(flat_SC.sum(0))
        product_CC = product_CC + wide(flat_SC.T @ flat_SC)
    patches = int(all_reduce_sum(torch.tensor(seen)))
    mean_C = all_reduce_sum(total_C.cpu()) / patches
    covariance_CC = all_reduce_sum(product_CC.cpu()) / patches - torch.outer(mean_C, mean_C)
    return Moments(mean_C, covariance_CC, gather_rows(sample_NeC).flatten(0, 1))


def at_places(map_BCHW: Tensor, place_Be: Tensor) -> Tensor:
    """Return the vectors at these places, row by row, of each map: B x e x C."""
    return map_BCHW.flatten(2).mT.gather(1, place_Be[..., None].expand(-1, -1, map_BCHW.shape[1]))


def principal_components(moments: Moments, width: int) -> tuple[Tensor, Tensor]:
    """Return weight, D x C, and bias of a half-whitened principal component analysis: directions in which patches vary
    much do not drown the others."""
    value_C, vector_CC = torch.linalg.eigh(moments.covariance_CC.cpu())
    value_D, vector_CD = value_C[-width:].clamp(min=float(value_C[-1]) * 1e-4), vector_CC[:, -width:]
    weight_DC = (vector_CD * value_D**-0.25).T
    return weight_DC, -(weight_DC @ moments.mean_C.cpu())
