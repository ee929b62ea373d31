"""Parts of what pictures show, found without any annotation: kinds of patches that most pictures show in one place."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.data.loaders import Images
from likethat.distributed import gather_rows
from likethat.inference.feature_maps import FeatureMaps, own_features_of
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Advance
from likethat.runtime import seed_for, send

CLUSTERS = int(os.environ.get("LT_CLUSTERS", 20))  # kinds of patches that parts are chosen among, at least
CLUSTERS_A_PART = 3
ROUNDS = 25  # of k-means
NEAR = 2  # cells around its peak in which a compact kind lies


@dataclass(frozen=True)
class Parts:
    """The m parts in every training image: the patch that shows each best, and whether it shows the part at all."""

    place_Nm: Tensor  # in the map, row by row
    shown_Nm: Tensor
    centre_mD: Tensor  # the mean patch of each part


@torch.no_grad()
def find_parts(
    model: ProtoPNet, images: Images | FeatureMaps, sample_SD: Tensor, count: int, advance: Advance | None = None
) -> Parts:
    """Find `count` parts. `sample_SD` are some patches of all images, among which kinds of patches are told apart.

    A kind is the better a part the more images show it, and the nearer to its peak in an image its patches lie:
    backgrounds are many kinds, of which an image shows few, all over the place.
    """
    kinds = min(max(CLUSTERS, CLUSTERS_A_PART * count), len(sample_SD))
    centre_MD = k_means(sample_SD, kinds)
    place_NM = torch.zeros(len(images), kinds, dtype=torch.long, device=images.device)
    compact_NM = torch.zeros(len(images), kinds, device=images.device)  # 0 where an image does not show the kind
    for index_B, feature_BCHW, _ in own_features_of(model.backbone, images, advance):
        here_B = send(index_B, images.device)
        patch_BDHW = model.prototype_layer.patches(model.add_on(feature_BCHW))
        place_NM[here_B], compact_NM[here_B] = locate(patch_BDHW, centre_MD)
    place_NM, compact_NM = gather_rows(place_NM), gather_rows(compact_NM)
    best_m = compact_NM.mean(0).topk(count).indices
    return Parts(place_NM[:, best_m], compact_NM[:, best_m] > 0, centre_MD[best_m])


def locate(patch_BDHW: Tensor, centre_MD: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each image and kind of patch where its peak is, and the share of its patches that lie near it.

    Patches are of the kind whose centre is nearest. The peak is the patch that lies nearest to the centre compared
    with any other centre.
    """
    width = patch_BDHW.shape[3]
    nearness_BSM = 2 * patch_BDHW.flatten(2).mT @ centre_MD.T - centre_MD.square().sum(1)
    best_BS2 = nearness_BSM.topk(min(2, len(centre_MD)), dim=2).values
    is_best_BSM = nearness_BSM == best_BS2[..., :1]
    lead_BSM = nearness_BSM - torch.where(is_best_BSM, best_BS2[..., -1:], best_BS2[..., :1])
    peak_BM = lead_BSM.argmax(1)
    place_S = torch.arange(nearness_BSM.shape[1], device=peak_BM.device)
    away_BSM = torch.maximum(
        (place_S[:, None] // width - peak_BM[:, None] // width).abs(),
        (place_S[:, None] % width - peak_BM[:, None] % width).abs(),
    )
    near_BM = (is_best_BSM & (away_BSM <= NEAR)).sum(1)
    return peak_BM, near_BM / is_best_BSM.sum(1).clamp(min=1)


def k_means(sample_SD: Tensor, count: int) -> Tensor:
    """Return `count` centres. They start at samples drawn one after another, far ones more often than near ones."""
    generator = torch.Generator().manual_seed(seed_for("parts"))
    centre_MD = sample_SD[torch.randint(len(sample_SD), (1,), generator=generator).to(sample_SD.device)]
    distance_S = (sample_SD - centre_MD).square().sum(1)
    for _ in range(count - 1):
        chance_S = distance_S.double().cpu().cumsum(0)
        pick = int(torch.searchsorted(chance_S, torch.rand(1, generator=generator, dtype=torch.double) * chance_S[-1]))
        new_1D = sample_SD[min(pick, len(sample_SD) - 1)][None]
        centre_MD = torch.cat([centre_MD, new_1D])
        distance_S = torch.minimum(distance_S, (sample_SD - new_1D).square().sum(1))
    for _ in range(ROUNDS):
        nearest_S = (2 * sample_SD @ centre_MD.T - centre_MD.square().sum(1)).argmax(1)
        member_SM = F.one_hot(nearest_S, count).to(sample_SD)
        size_M1 = member_SM.sum(0)[:, None]
        centre_MD = torch.where(size_M1 > 0, (member_SM.T @ sample_SD) / size_M1.clamp(min=1), centre_MD)
    return centre_MD
