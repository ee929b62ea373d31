"""Prototypes read off a fine-tuned plain classifier: its most telling patches, before any prototype is trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from likethat.data.loaders import Images
from likethat.distributed import join, own_part, total
from likethat.models.baseline import PlainClassifier
from likethat.models.protopnet import ProtoPNet, reset_last_layer
from likethat.progress import Advance
from likethat.runtime import send
from likethat.training.engine import EVAL_BATCH, own_batches_of, score_images
from likethat.training.losses import leave_source_out
from likethat.training.project import Projection

ROUNDS = 15  # of k-means
SMOOTHING = 0.1  # of the labels that the scale is fitted to
SCALES = (3.0, 5.0, 8.0, 12.0, 18.0, 25.0, 35.0, 50.0, 70.0, 100.0)


@dataclass(frozen=True)
class TellingPatches:
    """The patches of every training image that speak most for its class, and moments of all features."""

    feature_NtC: Tensor
    place_Nt: Tensor  # in the map, row by row
    evidence_Nt: Tensor
    mean_C: Tensor
    covariance_CC: Tensor


@torch.no_grad()
def start_from_classifier(
    model: ProtoPNet,
    plain: PlainClassifier,
    images: Images,
    share: float,
    advance: Advance | None = None,
) -> Projection:
    """Sets add-on, prototypes and last layer from `plain`, whose backbone the model shares.

    `share` of each image's patches may become prototypes. Returns where the prototypes come from, as a projection does.
    """
    telling = find_telling_patches(plain.eval(), images, telling_count(model, images, share), advance)
    set_add_on(model, telling.mean_C, telling.covariance_CC)
    layer = model.prototype_layer
    z_NtD = model.add_on(telling.feature_NtC.flatten(0, 1)[:, :, None, None])
    patch_NtD = layer.patches(z_NtD)[:, :, 0, 0].view(*telling.place_Nt.shape, -1)
    image_P = torch.zeros_like(layer.class_P)
    place_P = torch.zeros_like(layer.class_P)
    vector_PD = torch.zeros_like(layer.vectors())
    for label in range(model.num_classes):
        member_m = (layer.class_P == label).nonzero()[:, 0]
        number_n = (images.label_N == label).nonzero()[:, 0]
        candidate_SD = patch_NtD[number_n].flatten(0, 1)
        pick_m = spread_choice(candidate_SD, telling.evidence_Nt[number_n].flatten(), len(member_m))
        image_P[member_m] = number_n[pick_m // patch_NtD.shape[1]]
        place_P[member_m] = telling.place_Nt[number_n].flatten()[pick_m]
        vector_PD[member_m] = candidate_SD[pick_m]
    layer.prototype_PDhw.copy_(vector_PD.view_as(layer.prototype_PDhw))
    calibrate(model, images, image_P)
    width = model.patch_grid[1]
    return Projection(image_P, place_P // width, place_P % width, torch.zeros_like(vector_PD[:, 0]))


def telling_count(model: ProtoPNet, images: Images, share: float) -> int:
    """Patches of each image to choose from: a fixed share, or more where a class has few images for its prototypes."""
    height, width = model.patch_grid
    needed_K = model.own_KP.sum(1)
    image_K = images.label_N.bincount(minlength=model.num_classes).clamp(min=1)
    enough = int((needed_K / image_K).ceil().max())
    return min(height * width, max(enough, round(share * height * width), 1))


def find_telling_patches(plain: PlainClassifier, images: Images, count: int, advance: Advance | None) -> TellingPatches:
    """One pass. Evidence is the log-probability of the image's class by the patch alone: the classifier's logit is
    the mean of its patches' logits, so each patch has its say."""
    channels = plain.backbone.channels
    feature_NtC = torch.zeros(len(images), count, channels, device=images.device)
    place_Nt = torch.zeros(len(images), count, dtype=torch.long, device=images.device)
    evidence_Nt = torch.zeros(len(images), count, device=images.device)
    seen, total_C, product_CC = 0, torch.zeros(channels).double(), torch.zeros(channels, channels).double()
    for index_B, x_B3HW, label_B in own_batches_of(images, advance):
        here_B = send(index_B, images.device)
        feature_BSC = plain.backbone(x_B3HW).flatten(2).transpose(1, 2)
        logits_BSK = plain.head(feature_BSC)
        evidence_BS = logits_BSK.log_softmax(2).gather(2, label_B[:, None, None].expand(-1, logits_BSK.shape[1], 1))
        top = evidence_BS[..., 0].topk(count, dim=1)
        feature_NtC[here_B] = feature_BSC.gather(1, top.indices[..., None].expand(-1, -1, channels))
        place_Nt[here_B], evidence_Nt[here_B] = top.indices, top.values
        flat_SC = feature_BSC.flatten(0, 1)
        seen += len(flat_SC)
        total_C = total_C + flat_SC.sum(0).cpu().double()
        product_CC = product_CC + (flat_SC.T @ flat_SC).cpu().double()
    patches = int(total(torch.tensor(seen)))
    mean_C = total(total_C) / patches
    covariance_CC = total(product_CC) / patches - torch.outer(mean_C, mean_C)
    return TellingPatches(join(feature_NtC), join(place_Nt), join(evidence_Nt), mean_C, covariance_CC)


def set_add_on(model: ProtoPNet, mean_C: Tensor, covariance_CC: Tensor) -> None:
    """The linear add-on becomes a half-whitened principal component analysis of real features: directions in which
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
    """`count` different candidates, one near each centre of a k-means that starts at the strongest evidence and then
    at whatever lies farthest from the centres so far."""
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


def calibrate(model: ProtoPNet, images: Images, source_P: Tensor) -> None:
    """Own-class connections of equal weight, with the sum that predicts the training images best when no image may
    look at a prototype cut from it; no other connections. Smoothed labels keep separable images from asking for an
    ever larger sum."""
    own_KP = model.own_KP
    image_N1 = torch.arange(len(images), device=images.device)[:, None]
    score_NP = leave_source_out(score_images(model, images), image_N1, source_P, own_KP)
    mean_KP = own_KP / own_KP.sum(1, keepdim=True)
    entropy = {
        scale: float(F.cross_entropy(scale * score_NP @ mean_KP.T, images.label_N, label_smoothing=SMOOTHING))
        for scale in SCALES
    }
    best = min(entropy, key=entropy.__getitem__)
    reset_last_layer(model, best / float(own_KP.sum(1).float().mean()), 0.0)


@torch.no_grad()
def embed_sources(model: ProtoPNet, images: Images, source: Projection) -> None:
    """Prototypes become what the network, as it is now, makes of the patches they were cut from."""
    training = model.training
    model.eval()
    image_U, inverse_P = source.image_P.unique(return_inverse=True)
    layer = model.prototype_layer
    vectors = torch.zeros_like(layer.vectors())
    part = own_part(len(image_U), EVAL_BATCH)
    for start in range(part.start, part.stop, EVAL_BATCH):
        patch_BDHW = layer.patches(model.latent(images.batch(image_U[start : start + EVAL_BATCH])[0]))
        here_P = ((inverse_P >= start) & (inverse_P < start + EVAL_BATCH)).nonzero()[:, 0]
        vectors[here_P] = patch_BDHW[inverse_P[here_P] - start, :, source.row_P[here_P], source.column_P[here_P]]
    layer.prototype_PDhw.copy_(join(vectors).view_as(layer.prototype_PDhw))
    model.train(training)
