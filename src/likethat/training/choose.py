"""Prototypes read off a fine-tuned baseline: the patches that speak most for their class, before any is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from likethat.data.loaders import Images
from likethat.distributed import all_reduce_sum, gather_rows, own_shard
from likethat.inference.feature_maps import FeatureMaps, features_of, own_features_of
from likethat.inference.passes import EVAL_BATCH, groups_within, scores_by
from likethat.inference.source_image import leave_source_out
from likethat.models.baseline import BaselineClassifier
from likethat.models.protopnet import ProtoPNet, logits_of_scores, reset_last_layer
from likethat.progress import Advance
from likethat.runtime import send
from likethat.training.project import Projection

ROUNDS = 15  # of k-means
MOST_BYTES = 2**29  # of candidates in memory at a time
SMOOTHING = 0.1  # of the labels that the scale is fitted to
SCALES = (3.0, 5.0, 8.0, 12.0, 18.0, 25.0, 35.0, 50.0, 70.0, 100.0)


@dataclass(frozen=True)
class CandidatePatches:
    """The patches of every training image that speak most for its class, and moments of all features."""

    place_Nt: Tensor  # in the map, row by row
    evidence_Nt: Tensor
    feature_NtC: Tensor | None  # None where they would take more than MOST_BYTES
    mean_C: Tensor
    covariance_CC: Tensor


@torch.no_grad()
def start_from_baseline(
    model: ProtoPNet,
    baseline: BaselineClassifier,
    images: Images | FeatureMaps,
    share: float,
    advance: Advance | None = None,
) -> Projection:
    """Set add-on, prototypes and last layer from `baseline`, whose backbone the model shares.

    `share` of each image's patches may become prototypes. Returns where the prototypes come from, as a projection does.
    """
    found = find_candidate_patches(baseline.eval(), images, candidate_count(model, images, share), advance)
    set_add_on(model, found.mean_C, found.covariance_CC)
    layer = model.eval().prototype_layer
    image_P = torch.zeros_like(layer.class_P)
    place_P = torch.zeros_like(layer.class_P)
    vector_PD = torch.zeros_like(layer.vectors())
    place_T, evidence_T = found.place_Nt.flatten(), found.evidence_Nt.flatten()
    for label, candidate_S, patch_SD in candidates_by_class(model, images, found, advance):
        member_m = (layer.class_P == label).nonzero()[:, 0]
        pick_m = spread_choice(patch_SD, evidence_T[candidate_S], len(member_m))
        image_P[member_m] = candidate_S[pick_m] // found.place_Nt.shape[1]
        place_P[member_m] = place_T[candidate_S[pick_m]]
        vector_PD[member_m] = patch_SD[pick_m]
    layer.prototype_PDhw.copy_(vector_PD.view_as(layer.prototype_PDhw))
    scale_last_layer(model, images, image_P)
    width = model.patch_grid[1]
    return Projection(image_P, place_P // width, place_P % width, torch.zeros_like(vector_PD[:, 0]))


def candidate_count(model: ProtoPNet, images: Images | FeatureMaps, share: float) -> int:
    """Return how many patches of each image to choose from: a fixed share, or more where a class has few images."""
    height, width = model.patch_grid
    needed_K = model.own_KP.sum(1)
    image_K = images.label_N.bincount(minlength=model.num_classes).clamp(min=1)
    enough = int((needed_K / image_K).ceil().max())
    return min(height * width, max(enough, round(share * height * width), 1))


def find_candidate_patches(
    baseline: BaselineClassifier, images: Images | FeatureMaps, count: int, advance: Advance | None
) -> CandidatePatches:
    """Find candidates in one pass. Evidence is the log-probability of the image's class by the patch alone: the
    baseline's logit is the mean of its patches' logits, so each patch has its say."""
    channels = baseline.backbone.channels
    keep = 4 * len(images) * count * channels <= MOST_BYTES
    feature_NtC = torch.zeros(len(images), count, channels, device=images.device) if keep else None
    place_Nt = torch.zeros(len(images), count, dtype=torch.long, device=images.device)
    evidence_Nt = torch.zeros(len(images), count, device=images.device)
    seen, total_C, product_CC = 0, torch.zeros(channels).double(), torch.zeros(channels, channels).double()
    for index_B, feature_BCHW, label_B in own_features_of(baseline.backbone, images, advance):
        here_B = send(index_B, images.device)
        feature_BSC = feature_BCHW.flatten(2).transpose(1, 2)
        logits_BSK = baseline.head(feature_BSC)
        evidence_BS = logits_BSK.log_softmax(2).gather(2, label_B[:, None, None].expand(-1, logits_BSK.shape[1], 1))
        top = evidence_BS[..., 0].topk(count, dim=1)
        if feature_NtC is not None:
            feature_NtC[here_B] = feature_BSC.gather(1, top.indices[..., None].expand(-1, -1, channels))
        place_Nt[here_B], evidence_Nt[here_B] = top.indices, top.values
        flat_SC = feature_BSC.flatten(0, 1)
        seen += len(flat_SC)
        total_C = total_C + flat_SC.sum(0).cpu().double()
        product_CC = product_CC + (flat_SC.T @ flat_SC).cpu().double()
    patches = int(all_reduce_sum(torch.tensor(seen)))
    mean_C = all_reduce_sum(total_C) / patches
    covariance_CC = all_reduce_sum(product_CC) / patches - torch.outer(mean_C, mean_C)
    features = None if feature_NtC is None else gather_rows(feature_NtC)
    return CandidatePatches(gather_rows(place_Nt), gather_rows(evidence_Nt), features, mean_C, covariance_CC)


def candidates_by_class(
    model: ProtoPNet, images: Images | FeatureMaps, found: CandidatePatches, advance: Advance | None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield, for every class, its number, its candidates (numbers among the N*t patches) and their latent vectors.

    Vectors that were not kept are computed again, for as many classes at a time as fit into memory. A class that has
    too many by itself offers those with the strongest evidence.
    """
    layer, count = model.prototype_layer, found.place_Nt.shape[1]
    most = max(MOST_BYTES // (4 * layer.vectors().shape[1]), int(model.own_KP.sum(1).max()))
    place_T, evidence_T = found.place_Nt.flatten(), found.evidence_Nt.flatten()
    slot_t = torch.arange(count, device=images.device)
    candidates = []
    for label in range(model.num_classes):
        candidate_S = ((images.label_N == label).nonzero() * count + slot_t).flatten()
        if len(candidate_S) > most:
            candidate_S = candidate_S[evidence_T[candidate_S].topk(most).indices.sort().values]
        candidates.append(candidate_S)
    if found.feature_NtC is not None:
        patch_TD = layer.patches(model.add_on(found.feature_NtC.flatten(0, 1)[:, :, None, None]))[:, :, 0, 0]
        for label, candidate_S in enumerate(candidates):
            yield label, candidate_S, patch_TD[candidate_S]
        return
    for labels in groups_within([len(candidate_S) for candidate_S in candidates], most):
        together = candidates[labels.start : labels.stop]
        candidate_T = torch.cat(together)
        patch_TD = embed(model, images, candidate_T // count, place_T[candidate_T])
        yield from zip(labels, together, patch_TD.split([len(candidate_S) for candidate_S in together]), strict=True)
        if advance:
            advance(labels.stop, len(candidates))


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


def spread_choice(candidate_SD: Tensor, evidence_S: Tensor, count: int) -> Tensor:
    """Choose `count` different candidates, one near each centre of a k-means that starts at the strongest evidence and
    then at whatever lies farthest from the centres so far."""
    start = [int(evidence_S.argmax())]
    distance_S = (candidate_SD - candidate_SD[start[0]]).square().sum(1)
    for _ in range(count - 1):
        start.append(int(distance_S.argmax()))
        distance_S = torch.minimum(distance_S, (candidate_SD - candidate_SD[start[-1]]).square().sum(1))
    centre_mD = candidate_SD[start]
    for _ in range(ROUNDS):
        nearest_Sm = F.one_hot(torch.cdist(candidate_SD, centre_mD).argmin(1), count).to(candidate_SD)
        centre_mD = (nearest_Sm.T @ candidate_SD) / nearest_Sm.sum(0).clamp(min=1)[:, None]
    distance_mS = torch.cdist(centre_mD, candidate_SD)
    taken: list[int] = []
    for number in range(count):
        taken.append(int(distance_mS[number].argmin()))
        distance_mS[:, taken[-1]] = float("inf")
    return torch.tensor(taken, device=candidate_SD.device)


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
