"""Parts of what pictures show, found without any annotation: kinds of patches that most pictures show in one place, and
that look otherwise in other classes; and of a class, what the class most like it shows nowhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.data.cells import Cells
from likethat.data.loaders import Images
from likethat.distributed import all_reduce_sum, gather_rows
from likethat.inference.feature_maps import FeatureMaps, features_of, own_features_of
from likethat.inference.moments import at_places, feature_moments, principal_components
from likethat.inference.passes import eval_batch
from likethat.models.backbone import Backbone
from likethat.progress import Advance
from likethat.runtime import seed_for, send, wide

KINDS, KINDS_A_PART = 20, 2  # kinds of patches that parts are chosen among, at least; and for each part
STARTS = 8  # of k-means, of which that with the best parts counts
WIDTH = 512  # principal components that patches are compared by, at most
FIRST = 64  # of them, by which classes are compared
LEAST = 0.01  # share of class that is told from none
SAMPLES = 2**14  # patches that kinds are told apart by, at most
ROUNDS = 25  # of k-means
ROWS = 4096  # samples whose distances are computed at a time
NEAR = 2  # cells around its peak in which a compact kind lies
SMOOTHED = 3  # rows and columns of cells that the unlikeness of a patch is the mean of
TURNS = 5  # of looking for what the patches that were found unlike have in common
MOST_OF_TWIN = 100  # images of a class that another one is compared with


@dataclass(frozen=True)
class Parts:
    """The m parts in every training image: the patch that shows each best, and whether it shows the part at all."""

    place_Nm: Tensor  # in the map, row by row
    shown_Nm: Tensor

    def select(self, keep_n: Tensor) -> Parts:
        """Return the parts of some of the images only."""
        return Parts(self.place_Nm[keep_n], self.shown_Nm[keep_n])

    def middles(self, cells: Cells) -> Tensor:
        """Return where in each image, from -1 to 1, the parts lie: N x m x 2 (x, y), NaN where it does not show one."""
        return cells.places(self.place_Nm).masked_fill(~self.shown_Nm[..., None], torch.nan)


@torch.no_grad()
def find_parts(
    backbone: Backbone,
    images: Images | FeatureMaps,
    count: int,
    on_NHW: Tensor | None = None,
    decisive_among: Sequence[int] | None = None,
    advance: Advance | None = None,
) -> Parts:
    """Find `count` parts by what a backbone, in evaluation mode, makes of the images, in the cells of `on_NHW` alone
    where it is given. With `decisive_among`, which says of how many of its parts each class makes use, one of these is
    what the class most like it shows nowhere.

    A kind of patch is the better a part the more images show it, and the nearer to its peak in an image its patches
    lie: backgrounds are of many kinds, of which an image shows few, all over the place. And it is the better the more
    its patches at the peak differ from class to class: the corner of a picture is in every picture, and says nothing.
    Kinds are told apart several times, from other starts; the best parts together win.
    """
    places = backbone.map_size[0] * backbone.map_size[1]
    each = min(places, max(1, SAMPLES // len(images)))
    found = feature_moments(backbone, images, each)
    weight_DC, bias_D = principal_components(found, min(WIDTH, backbone.channels))
    weight_DC, bias_D = weight_DC.to(found.sample_SC), bias_D.to(found.sample_SC)
    kinds = min(max(KINDS, KINDS_A_PART * count), len(found.sample_SC))
    sample_SD = F.normalize(found.sample_SC @ weight_DC.T + bias_D, dim=1)
    centre_AMD = torch.stack([k_means(sample_SD, kinds, seed_for("parts", start)) for start in range(STARTS)])
    place_NAM = torch.zeros(len(images), STARTS, kinds, dtype=torch.long, device=images.device)
    compact_NAM = torch.zeros(len(images), STARTS, kinds, device=images.device)  # 0 where an image shows none of a kind
    classes = int(images.label_N.max()) + 1
    total_KAMD = torch.zeros(classes, STARTS, kinds, min(FIRST, len(bias_D)), device=images.device)
    square_AM = torch.zeros(STARTS, kinds, device=images.device)
    for index_B, feature_BCHW, label_B in own_features_of(backbone, images):
        here_B, class_BK = send(index_B, images.device), F.one_hot(label_B, classes).float()
        patch_BDHW = unit_patches(feature_BCHW, weight_DC, bias_D)
        on_BHW = None if on_NHW is None else on_NHW.to(images.device)[here_B]
        for start, centre_MD in enumerate(centre_AMD):
            place_BM, compact_BM = locate(patch_BDHW, centre_MD, on_BHW)
            place_NAM[here_B, start], compact_NAM[here_B, start] = place_BM, compact_BM
            peak_BMD = at_places(patch_BDHW[:, -FIRST:], place_BM) * (compact_BM > 0)[..., None]
            total_KAMD[:, start] += torch.einsum("bk,bmd->kmd", class_BK, peak_BMD)
            square_AM[start] += peak_BMD.square().sum((0, 2))
    place_NAM, compact_NAM = gather_rows(place_NAM), gather_rows(compact_NAM)
    shown_NAM = (compact_NAM > 0).long()
    count_KAM = shown_NAM.new_zeros(classes, STARTS, kinds).index_add_(0, images.label_N, shown_NAM)
    of_class_AM = share_of_class(all_reduce_sum(total_KAMD), all_reduce_sum(square_AM), count_KAM)
    best_Am = (compact_NAM.mean(0) * of_class_AM.clamp(min=LEAST)).topk(count, dim=1)
    start = int(best_Am.values.sum(1).argmax())
    best_m = best_Am.indices[start]
    parts = Parts(place_NAM[:, start, best_m], compact_NAM[:, start, best_m] > 0)
    if decisive_among is None or classes == 1:
        return parts
    to_patches = partial(unit_patches, weight_DC=weight_DC, bias_D=bias_D)
    return with_decisive_parts(backbone, images, to_patches, parts, decisive_among, on_NHW, advance)


def unit_patches(feature_BCHW: Tensor, weight_DC: Tensor, bias_D: Tensor) -> Tensor:
    """Return the principal components of features as unit vectors: B x D x H x W."""
    patch_BDHW = torch.einsum("bchw,dc->bdhw", feature_BCHW, weight_DC) + bias_D[:, None, None]
    return F.normalize(patch_BDHW, dim=1)


def locate(patch_BDHW: Tensor, centre_MD: Tensor, on_BHW: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return for each image and kind of patch where its peak is, and the share of its patches that lie near it; of
    those in `on_BHW`, where not all count.

    Patches are of the kind whose centre is nearest. The peak is the patch that lies nearest to the centre compared
    with any other centre.
    """
    width = patch_BDHW.shape[3]
    nearness_BSM = 2 * (patch_BDHW.flatten(2).mT @ centre_MD.T) - centre_MD.square().sum(1)
    best_BS2 = nearness_BSM.topk(min(2, len(centre_MD)), dim=2).values
    is_best_BSM = nearness_BSM == best_BS2[..., :1]
    lead_BSM = nearness_BSM - torch.where(is_best_BSM, best_BS2[..., -1:], best_BS2[..., :1])
    if on_BHW is not None:
        on_BS1 = on_BHW.flatten(1)[..., None]
        is_best_BSM, lead_BSM = is_best_BSM & on_BS1, lead_BSM.masked_fill(~on_BS1, -torch.inf)
    peak_BM = lead_BSM.argmax(1)
    place_S = torch.arange(nearness_BSM.shape[1], device=peak_BM.device)
    away_BSM = torch.maximum(
        (place_S[:, None] // width - peak_BM[:, None] // width).abs(),
        (place_S[:, None] % width - peak_BM[:, None] % width).abs(),
    )
    near_BM = (is_best_BSM & (away_BSM <= NEAR)).sum(1)
    return peak_BM, near_BM / is_best_BSM.sum(1).clamp(min=1)


def share_of_class(total_KAMD: Tensor, square_AM: Tensor, count_KAM: Tensor) -> Tensor:
    """Return how much of the spread of vectors is that of the means of their classes, less what chance makes of it.

    Given are the sum of the vectors of every class, their number, and the sum of the squared lengths of all.
    """
    count_AM, mean_square_AM = count_KAM.sum(0), total_KAMD.sum(0).square().sum(-1) / count_KAM.sum(0).clamp(min=1)
    of_means_AM = (total_KAMD.square().sum(-1) / count_KAM.clamp(min=1)).sum(0) - mean_square_AM
    share_AM = of_means_AM / (square_AM - mean_square_AM).clamp(min=1e-12)
    chance_AM = ((count_KAM > 0).sum(0) - 1).clamp(min=0) / (count_AM - 1).clamp(min=1)
    return torch.where(chance_AM < 1, (share_AM - chance_AM) / (1 - chance_AM).clamp(min=1e-6), 0.0)


def k_means(sample_SD: Tensor, count: int, seed: int) -> Tensor:
    """Return `count` centres. They start at samples drawn one after another, far ones more often than near ones."""
    generator = torch.Generator().manual_seed(seed)
    centre_MD = sample_SD[torch.randint(len(sample_SD), (1,), generator=generator).to(sample_SD.device)]
    distance_S = _squared_distances(sample_SD, centre_MD)
    for _ in range(count - 1):
        chance_S = distance_S.cpu().double().cumsum(0)
        pick = int(torch.searchsorted(chance_S, torch.rand(1, generator=generator, dtype=torch.double) * chance_S[-1]))
        new_1D = sample_SD[min(pick, len(sample_SD) - 1)][None]
        centre_MD = torch.cat([centre_MD, new_1D])
        distance_S = torch.minimum(distance_S, _squared_distances(sample_SD, new_1D))
    for _ in range(ROUNDS):
        nearest_S = (2 * (sample_SD @ centre_MD.T) - centre_MD.square().sum(1)).argmax(1)
        member_SM = F.one_hot(nearest_S, count).to(sample_SD)
        size_M1 = member_SM.sum(0)[:, None]
        centre_MD = torch.where(size_M1 > 0, (member_SM.T @ sample_SD) / size_M1.clamp(min=1), centre_MD)
    return centre_MD


def _squared_distances(sample_SD: Tensor, point_1D: Tensor) -> Tensor:
    """Return the squared distance of every sample to a point; on a CPU some after others, which its caches hold."""
    rows = ROWS if sample_SD.device.type == "cpu" else len(sample_SD)
    return torch.cat([(sample_sD - point_1D).square().sum(1) for sample_sD in sample_SD.split(rows)])


@torch.no_grad()
def with_decisive_parts(
    backbone: Backbone,
    images: Images | FeatureMaps,
    to_patches: Callable[[Tensor], Tensor],
    parts: Parts,
    count_K: Sequence[int],
    on_NHW: Tensor | None = None,
    advance: Advance | None = None,
) -> Parts:
    """Replace one of each class's first `count_K` parts, the nearest one, by what its twin, the class most like it,
    shows nowhere.

    `to_patches` makes patches, as unit vectors, of the features of the backbone that the parts were found by. Of a twin
    with many images, a sample spread over them is looked at.
    """

    def patches_of(image_n: Tensor) -> Tensor:
        split = image_n.split(eval_batch(images.device))
        return torch.cat([to_patches(features_of(backbone, images, image_B)) for image_B in split])

    image_of = [(images.label_N == label).nonzero()[:, 0] for label in range(len(count_K))]
    mean_KmD = torch.stack([mean_looks(patches_of(image_n), parts.select(image_n)) for image_n in image_of])
    place_Nm, shown_Nm = parts.place_Nm.clone(), parts.shown_Nm.clone()
    for label, (image_n, twin) in enumerate(zip(image_of, most_alike(mean_KmD).tolist(), strict=True)):
        patch_nDHW, twin_o = patches_of(image_n), image_of[twin]
        twin_o = twin_o[:: -(-len(twin_o) // MOST_OF_TWIN)]
        on_nHW = None if on_NHW is None else on_NHW.to(images.device)[image_n]
        place_n = find_unlike(patch_nDHW, patches_of(twin_o), on_nHW)
        used = Parts(parts.place_Nm[image_n, : count_K[label]], parts.shown_Nm[image_n, : count_K[label]])
        slot = nearest_part(place_n, used, patch_nDHW.shape[3])
        place_Nm[image_n, slot], shown_Nm[image_n, slot] = place_n, True
        if advance:
            advance(label + 1, len(count_K))
    return Parts(place_Nm, shown_Nm)


def mean_looks(patch_nDHW: Tensor, parts: Parts) -> Tensor:
    """Return the mean patch of each part over the images of a class that show it: m x D."""
    shown_nm1 = parts.shown_Nm[..., None]
    return (at_places(patch_nDHW, parts.place_Nm) * shown_nm1).sum(0) / shown_nm1.sum(0).clamp(min=1)


def most_alike(mean_KmD: Tensor) -> Tensor:
    """Return of each class the one whose parts look most like its own."""
    distance_KK = torch.cdist(mean_KmD.flatten(1), mean_KmD.flatten(1))
    return distance_KK.fill_diagonal_(torch.inf).argmin(1)


def find_unlike(patch_nDHW: Tensor, other_oDHW: Tensor, on_nHW: Tensor | None = None) -> Tensor:
    """Return in each image of a class the place of the kind of patch that the other class does not have.

    A patch is unlike as far as the patches of the other class's images that are most like it are, on average, and as
    far as those around it are. From the patch of each image that is most so, places move to where patches are like the
    mean of them all, too.
    """
    unlike_nS = torch.stack([unlikeness(patch_DHW, other_oDHW) for patch_DHW in patch_nDHW]).flatten(1)
    if on_nHW is not None:
        unlike_nS = unlike_nS.masked_fill(~on_nHW.flatten(1), -torch.inf)
    place_n = unlike_nS.argmax(1)
    for _ in range(TURNS):
        mean_D = F.normalize(at_places(patch_nDHW, place_n[:, None])[:, 0].mean(0), dim=0)
        place_n = (torch.einsum("ndhw,d->nhw", patch_nDHW, mean_D).flatten(1) + unlike_nS).argmax(1)
    return place_n


def unlikeness(patch_DHW: Tensor, other_oDHW: Tensor) -> Tensor:
    """Return of each patch of an image one less its similarity to the most similar patch of another image, on average
    over those and over the patches around it: H x W."""
    similarity_SoS = torch.einsum("ds,odt->sot", patch_DHW.flatten(1), other_oDHW.flatten(2))
    unlike_HW = (1 - similarity_SoS.amax(2).mean(1)).unflatten(0, patch_DHW.shape[1:])
    around = SMOOTHED // 2
    return F.avg_pool2d(unlike_HW[None, None], SMOOTHED, 1, around, count_include_pad=False)[0, 0]


def nearest_part(place_n: Tensor, parts: Parts, width: int) -> int:
    """Return the part that lies nearest to these places, on average over the images that show it."""
    place_nm, shown_nm, place_n1 = parts.place_Nm.cpu(), parts.shown_Nm.cpu(), place_n.cpu()[:, None]
    rows_nm, columns_nm = place_nm // width - place_n1 // width, place_nm % width - place_n1 % width
    distance_nm = wide(rows_nm.square() + columns_nm.square()).sqrt() * shown_nm
    shown_m = shown_nm.sum(0)
    return int(torch.where(shown_m > 0, distance_nm.sum(0) / shown_m.clamp(min=1), torch.inf).argmin())
