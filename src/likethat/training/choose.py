"""Prototypes read off a fine-tuned baseline: of every class, the patches that show the parts of what pictures show."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from likethat.config.settings import TrainConfig
from likethat.data.loaders import Images
from likethat.distributed import all_reduce_sum, gather_rows
from likethat.inference.discriminants import discriminants, part_scatter
from likethat.inference.feature_maps import FeatureMaps, own_features_of
from likethat.inference.moments import feature_moments, principal_components
from likethat.inference.passes import groups_within, scores_by
from likethat.inference.source_image import leave_source_out
from likethat.models.baseline import BaselineClassifier
from likethat.models.protopnet import ProtoPNet, logits_of_scores, reset_last_layer
from likethat.runtime import send
from likethat.training.parts import Parts
from likethat.training.project import Projection, embed

MOST_BYTES = 2**29  # of patches in memory at a time
COMMON = 3.0  # weight of a patch's likeness to cells in general, against its likeness to those of its class and part
SMOOTHING = 0.1  # of the labels that the scale is fitted to
SCALES = (3.0, 5.0, 8.0, 12.0, 18.0, 25.0, 35.0, 50.0, 70.0, 100.0)


@torch.no_grad()
def start_from_baseline(
    model: ProtoPNet,
    baseline: BaselineClassifier,
    images: Images | FeatureMaps,
    parts: Parts,
    add_on_start: str = TrainConfig.add_on_start,
) -> Projection:
    """Set add-on, prototypes and last layer from `baseline`, whose backbone the model shares.

    The m-th prototype of every class shows the m-th part. Return where the prototypes come from, as a projection does.
    """
    baseline.eval()
    model.eval()
    height, width = model.patch_grid
    set_add_on(model, images, parts, add_on_start)
    layer = model.prototype_layer
    patches = PatchesByClass(model, images, parts.place_Nm)
    ordinary_mD = mean_patches(patches, parts) + COMMON * mean_cell(model, images)
    image_P, place_P = torch.zeros_like(layer.class_P), torch.zeros_like(layer.class_P)
    for label, image_n, patch_nmD in patches:
        member_m = (layer.class_P == label).nonzero()[:, 0]
        pick_m, place_m = typical_patches(patch_nmD, ordinary_mD, parts.select(image_n), len(member_m), height * width)
        image_P[member_m], place_P[member_m] = image_n[pick_m], place_m
    vector_PD = embed(model, images, image_P, place_P)
    layer.prototype_PDhw.copy_(vector_PD.view_as(layer.prototype_PDhw))
    scale_last_layer(model, images, image_P)
    return Projection(image_P, place_P // width, place_P % width, torch.zeros_like(vector_PD[:, 0]))


class PatchesByClass:
    """Of every class its number, its n images, and the m patches of each that lie at these places, to go through as
    often as needed: kept where all fit into memory, else embedded again each time."""

    def __init__(self, model: ProtoPNet, images: Images | FeatureMaps, place_Nm: Tensor) -> None:
        self.model, self.images, self.place_Nm = model, images, place_Nm
        self.image_of = [(images.label_N == label).nonzero()[:, 0] for label in range(model.num_classes)]
        size = 4 * place_Nm.shape[1] * model.prototype_layer.vectors().shape[1]
        self.groups = list(groups_within([size * len(image_n) for image_n in self.image_of], MOST_BYTES))
        self.kept = list(self._embedded()) if len(self.groups) == 1 else None

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        return self._embedded() if self.kept is None else iter(self.kept)

    def _embedded(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        parts = self.place_Nm.shape[1]
        for labels in self.groups:
            together = self.image_of[labels.start : labels.stop]
            image_S = torch.cat(together)
            place_T = self.place_Nm[image_S].flatten()
            patch_TD = embed(self.model, self.images, image_S.repeat_interleave(parts), place_T)
            split = patch_TD.unflatten(0, (-1, parts)).split([len(image_n) for image_n in together])
            yield from zip(labels, together, split, strict=True)


def mean_patches(patches: PatchesByClass, parts: Parts) -> Tensor:
    """Return the mean patch of each part, over the images that show it: m x D."""
    total_mD = sum((patch_nmD * parts.shown_Nm[image_n][..., None]).sum(0) for _, image_n, patch_nmD in patches)
    return total_mD / parts.shown_Nm.sum(0).clamp(min=1)[:, None]


def mean_cell(model: ProtoPNet, images: Images | FeatureMaps) -> Tensor:
    """Return the mean patch of all cells: D. It is like those that a network makes of backgrounds, where it leaves them
    blank: they have one direction, whatever they show, and a prototype cut from one is found in every picture."""
    layer = model.prototype_layer
    total_D = torch.zeros_like(layer.vectors()[0])
    for _, feature_BCHW, _ in own_features_of(model.backbone, images):
        total_D = total_D + layer.patches(model.add_on(feature_BCHW)).sum((0, 2, 3))
    height, width = model.patch_grid
    return all_reduce_sum(total_D) / (len(images) * height * width)


def typical_patches(
    patch_nmD: Tensor, ordinary_mD: Tensor, parts: Parts, count: int, places: int
) -> tuple[Tensor, Tensor]:
    """Return for each of `count` parts which image of a class shows it in the class's own manner most, and where.

    That is the patch farthest from what is ordinary in the direction of the part's mean over this class. No two are one
    patch: where an image does not show two parts, its patches for them may be one.
    """
    weight_nm = parts.shown_Nm + 1e-3  # where no image of the class shows a part, all count
    own_mD = (weight_nm[..., None] * patch_nmD).sum(0) / weight_nm.sum(0)[:, None]
    typical_nm = torch.einsum("nmd,md->nm", patch_nmD, own_mD - ordinary_mD)
    order_nm = (typical_nm + 10.0 * parts.shown_Nm).argsort(dim=0, descending=True, stable=True).tolist()
    place = parts.place_Nm.tolist()
    taken: dict[tuple[int, int], None] = {}
    for m in range(count):
        own = ((row[m], place[row[m]][m]) for row in order_nm)
        any_other = itertools.product(range(len(place)), range(places))
        taken[next(patch for patch in itertools.chain(own, any_other) if patch not in taken)] = None
    pick_m, place_m = torch.tensor(list(taken), device=patch_nmD.device).T
    return pick_m, place_m


def set_add_on(model: ProtoPNet, images: Images | FeatureMaps, parts: Parts, start: str) -> None:
    """Make the linear add-on the principal components of all features, or the discriminants of those at the parts."""
    convolution = model.add_on[0]
    assert isinstance(convolution, nn.Conv2d)
    assert convolution.bias is not None
    backbone, width = model.backbone, convolution.out_channels
    if start == "lda":
        weight_DC, bias_D = discriminants(part_scatter(backbone, images, parts.place_Nm, parts.shown_Nm), width)
    else:
        weight_DC, bias_D = principal_components(feature_moments(backbone, images, 0), width)
    convolution.weight.copy_(weight_DC[:, :, None, None])
    convolution.bias.copy_(bias_D)


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
