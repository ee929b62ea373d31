"""Prototypes read off a fine-tuned baseline: of every class, the patches that show the parts of what pictures show."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from likethat.data.loaders import Images
from likethat.distributed import all_reduce_sum, gather_rows, own_shard
from likethat.inference.feature_maps import FeatureMaps, features_of, keep_feature_maps, own_features_of
from likethat.inference.passes import EVAL_BATCH, groups_within, scores_by
from likethat.inference.source_image import leave_source_out
from likethat.models.baseline import BaselineClassifier
from likethat.models.protopnet import ProtoPNet, logits_of_scores, reset_last_layer
from likethat.progress import Advance
from likethat.runtime import send
from likethat.training.parts import Parts, find_parts
from likethat.training.project import Projection

SAMPLES = 2**15  # patches that kinds of patches are told apart by, at most
MOST_BYTES = 2**29  # of feature maps or patches in memory at a time
SMOOTHING = 0.1  # of the labels that the scale is fitted to
SCALES = (3.0, 5.0, 8.0, 12.0, 18.0, 25.0, 35.0, 50.0, 70.0, 100.0)


@torch.no_grad()
def start_from_baseline(
    model: ProtoPNet, baseline: BaselineClassifier, images: Images | FeatureMaps, advance: Advance | None = None
) -> tuple[Projection, Parts]:
    """Sets add-on, prototypes and last layer from `baseline`, whose backbone the model shares.

    Returns where the prototypes come from, as a projection does, and the parts that they show: the m-th prototype of
    every class shows the m-th part.
    """
    baseline.eval()
    model.eval()
    height, width = model.patch_grid
    if isinstance(images, Images) and 4 * len(images) * height * width * baseline.backbone.channels <= MOST_BYTES:
        everything = torch.arange(len(images), device=images.device)
        images = keep_feature_maps(baseline.backbone, images, everything)
    sample_SC, mean_C, covariance_CC = sample_features(baseline, images, advance)
    set_add_on(model, mean_C, covariance_CC)
    layer = model.prototype_layer
    sample_SD = layer.patches(model.add_on(sample_SC[:, :, None, None]))[:, :, 0, 0]
    count_K = model.own_KP.sum(1)
    parts = find_parts(model, images, sample_SD, int(count_K.max()), advance)
    image_P, place_P = torch.zeros_like(layer.class_P), torch.zeros_like(layer.class_P)
    vector_PD = torch.zeros_like(layer.vectors())
    for label, image_n, patch_nmD in patches_by_class(model, images, parts.place_Nm):
        member_m = (layer.class_P == label).nonzero()[:, 0]
        pick_m, place_m = typical_patches(patch_nmD, parts, image_n, len(member_m), height * width)
        image_P[member_m], place_P[member_m] = image_n[pick_m], place_m
    vector_PD = embed(model, images, image_P, place_P)
    layer.prototype_PDhw.copy_(vector_PD.view_as(layer.prototype_PDhw))
    scale_last_layer(model, images, image_P)
    return Projection(image_P, place_P // width, place_P % width, torch.zeros_like(vector_PD[:, 0])), parts


def sample_features(
    baseline: BaselineClassifier, images: Images | FeatureMaps, advance: Advance | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return some features of every image, and the mean and covariance of all. One pass."""
    rows, columns = baseline.backbone.map_size
    places, channels = rows * columns, baseline.backbone.channels
    each = min(places, max(1, SAMPLES // len(images)))
    spread_e = torch.arange(each, device=images.device) * places // each
    sample_NeC = torch.zeros(len(images), each, channels, device=images.device)
    seen, total_C, product_CC = 0, torch.zeros(channels).double(), torch.zeros(channels, channels).double()
    for index_B, feature_BCHW, _ in own_features_of(baseline.backbone, images, advance):
        here_B = send(index_B, images.device)
        feature_BSC = feature_BCHW.flatten(2).mT
        place_Be = (here_B[:, None] * 37 + spread_e) % places  # other places in every image
        sample_NeC[here_B] = feature_BSC.gather(1, place_Be[..., None].expand(-1, -1, channels))
        flat_SC = feature_BSC.flatten(0, 1)
        seen += len(flat_SC)
        total_C = total_C + flat_SC.sum(0).cpu().double()
        product_CC = product_CC + (flat_SC.T @ flat_SC).cpu().double()
    patches = int(all_reduce_sum(torch.tensor(seen)))
    mean_C = all_reduce_sum(total_C) / patches
    covariance_CC = all_reduce_sum(product_CC) / patches - torch.outer(mean_C, mean_C)
    return gather_rows(sample_NeC).flatten(0, 1), mean_C, covariance_CC


def patches_by_class(
    model: ProtoPNet, images: Images | FeatureMaps, place_Nm: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield of every class its number, its n images, and the m patches of each that lie at these places."""
    parts, width = place_Nm.shape[1], model.prototype_layer.vectors().shape[1]
    image_of = [(images.label_N == label).nonzero()[:, 0] for label in range(model.num_classes)]
    for labels in groups_within([4 * len(image_n) * parts * width for image_n in image_of], MOST_BYTES):
        together = image_of[labels.start : labels.stop]
        image_S = torch.cat(together)
        patch_TD = embed(model, images, image_S.repeat_interleave(parts), place_Nm[image_S].flatten())
        split = patch_TD.unflatten(0, (-1, parts)).split([len(image_n) for image_n in together])
        yield from zip(labels, together, split, strict=True)


def typical_patches(patch_nmD: Tensor, parts: Parts, image_n: Tensor, count: int, places: int) -> tuple[Tensor, Tensor]:
    """Return for each of `count` parts which image of a class shows it in the class's own manner most, and where.

    That is the patch farthest from the part's mean in the direction of the class's mean. No two are one patch: where
    an image does not show two parts, its patches for them may be one.
    """
    shown_nm, place_nm = parts.shown_Nm[image_n], parts.place_Nm[image_n]
    weight_nm = shown_nm + 1e-3  # where no image of the class shows a part, all count
    mean_mD = (weight_nm[..., None] * patch_nmD).sum(0) / weight_nm.sum(0)[:, None]
    typical_nm = torch.einsum("nmd,md->nm", patch_nmD, mean_mD - parts.centre_mD)
    order_nm = (typical_nm + 10.0 * shown_nm).argsort(dim=0, descending=True, stable=True).tolist()
    place = place_nm.tolist()
    taken: dict[tuple[int, int], None] = {}
    for m in range(count):
        own = ((row[m], place[row[m]][m]) for row in order_nm)
        any_other = itertools.product(range(len(image_n)), range(places))
        taken[next(patch for patch in itertools.chain(own, any_other) if patch not in taken)] = None
    pick_m, place_m = torch.tensor(list(taken), device=image_n.device).T
    return pick_m, place_m


def set_add_on(model: ProtoPNet, mean_C: Tensor, covariance_CC: Tensor) -> None:
    """Make the linear add-on a half-whitened principal component analysis of real features: directions in which
    patches vary much do not drown the others."""
    convolution = model.add_on[0]
    assert isinstance(convolution, nn.Conv2d)
    width = convolution.out_channels
    value_C, vector_CC = torch.linalg.eigh(covariance_CC.cpu())
    value_D, vector_CD = value_C[-width:].clamp(min=float(value_C[-1]) * 1e-4), vector_CC[:, -width:]
    weight_DC = (vector_CD * value_D**-0.25).T
    convolution.weight.copy_(weight_DC[:, :, None, None])
    assert convolution.bias is not None
    convolution.bias.copy_(-(weight_DC @ mean_C.cpu()))


def scale_last_layer(model: ProtoPNet, images: Images | FeatureMaps, source_P: Tensor) -> None:
    """Connect own-class prototypes with equal weights, whose sum predicts the training images best when no image may
    look at a prototype cut from it; set all other connections to zero. Smoothed labels keep separable images from
    asking for an ever larger sum."""
    own_KP = model.own_KP
    mean_KP = own_KP / own_KP.sum(1, keepdim=True)
    scale_L = torch.tensor(SCALES, device=images.device)
    entropy_NL = torch.zeros(len(images), len(SCALES), device=images.device)
    for index_B, feature_BCHW, label_B in own_features_of(model.backbone, images):
        image_B = send(index_B, images.device)
        score_BP = scores_by(model.prototype_layer, model.add_on(feature_BCHW))
        fair_BP = leave_source_out(score_BP, image_B[:, None], source_P, own_KP)
        logits_BKL = logits_of_scores(fair_BP, mean_KP)[..., None] * scale_L
        label_BL = label_B[:, None].expand(-1, len(SCALES))
        entropy_NL[image_B] = F.cross_entropy(logits_BKL, label_BL, label_smoothing=SMOOTHING, reduction="none")
    best = SCALES[int(gather_rows(entropy_NL).mean(0).argmin())]
    reset_last_layer(model, best / float(own_KP.sum(1).float().mean()), 0.0)


@torch.no_grad()
def embed_sources(model: ProtoPNet, images: Images, source: Projection) -> None:
    """Set prototypes to what the network, as it is now, makes of the patches they were cut from."""
    training = model.training
    model.eval()
    layer = model.prototype_layer
    vector_PD = embed(model, images, source.image_P, source.row_P * model.patch_grid[1] + source.column_P)
    layer.prototype_PDhw.copy_(vector_PD.view_as(layer.prototype_PDhw))
    model.train(training)


def embed(model: ProtoPNet, images: Images | FeatureMaps, image_S: Tensor, place_S: Tensor) -> Tensor:
    """Return the latent vectors of patches, each a place (row by row) in an image: S x D."""
    layer = model.prototype_layer
    image_U, inverse_S = image_S.unique(return_inverse=True)
    vector_SD = layer.vectors().new_zeros(len(image_S), layer.vectors().shape[1])
    part = own_shard(len(image_U), EVAL_BATCH)
    for start in range(part.start, part.stop, EVAL_BATCH):
        feature_BCHW = features_of(model.backbone, images, image_U[start : start + EVAL_BATCH])
        patch_BDS = layer.patches(model.add_on(feature_BCHW)).flatten(2)
        here_s = ((inverse_S >= start) & (inverse_S < start + EVAL_BATCH)).nonzero()[:, 0]
        vector_SD[here_s] = patch_BDS[inverse_S[here_s] - start, :, place_S[here_s]]
    return gather_rows(vector_SD)
