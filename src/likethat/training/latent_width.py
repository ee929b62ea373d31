"""D by cross-validation on the training images (`--latent-width auto`).

The baseline is trained by then and its backbone stays as it is, so feature maps are computed once at most; each width
and fold costs only a choice of prototypes among them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from likethat.config.settings import Config
from likethat.data.loaders import Images
from likethat.distributed import broadcast_object
from likethat.inference.feature_maps import FeatureMaps, keep_feature_maps
from likethat.inference.passes import logits_by, own_batches_of
from likethat.models.baseline import BaselineClassifier
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Advance
from likethat.training.choose import start_from_baseline
from likethat.training.parts import Parts

WIDTHS = (128, 256, 512)  # the paper's
FOLDS = 3
NOISE = 2.0  # standard errors that a difference must exceed to count
MOST_IMAGES = 6000  # that take part; enough to tell widths apart, and their maps fit into memory


@dataclass(frozen=True)
class WidthChoice:
    """Which images each width got right when its prototypes were chosen from others; no widths where there was nothing
    to compare."""

    chosen: int
    widths: tuple[int, ...]
    right_WN: Tensor

    def accuracy(self) -> dict[int, float]:
        return dict(zip(self.widths, self.right_WN.cpu().double().mean(1).tolist(), strict=True))


def candidate_widths(channels: int) -> tuple[int, ...]:
    """Return the widths that the backbone has channels for; where it has fewer than any, as many as it has."""
    return tuple(width for width in WIDTHS if width <= channels) or (channels,)


@torch.no_grad()
def choose_latent_width(
    baseline: BaselineClassifier,
    images: Images | FeatureMaps,
    parts: Parts,
    config: Config,
    advance: Advance | None = None,
) -> WidthChoice:
    """Choose the smallest width whose accuracy on left-out images differs from the best one's by no more than noise."""
    widths = candidate_widths(baseline.backbone.channels)
    held = held_out_fold(images.label_N, FOLDS)
    if len(widths) == 1 or not bool((held >= 0).any()):
        return WidthChoice(widths[0], (), torch.ones(0, 0))
    keep_N = (ranks_in_class(images.label_N) < max(FOLDS, MOST_IMAGES // int(images.label_N.max() + 1))).nonzero()[:, 0]
    if isinstance(images, FeatureMaps):
        maps = images.select(keep_N)
    else:
        maps = keep_feature_maps(baseline.eval().backbone, images, keep_N)
    held, parts = held[keep_N], parts.select(keep_N)
    right = []
    for number, width in enumerate(widths):
        right_n = torch.zeros(len(maps), dtype=torch.bool, device=maps.device)
        for fold in range(FOLDS):
            inside = held == fold
            if bool(inside.any()):
                model = model_on_maps(baseline, maps.select(~inside), parts.select(~inside), config, width)
                logits_nK = classify_maps(model, maps.select(inside))
                right_n[inside] = logits_nK.argmax(1) == maps.label_N[inside]
            if advance:
                advance(number * FOLDS + fold + 1, len(widths) * FOLDS)
        right.append(right_n[held >= 0])
    right_WN = torch.stack(right).cpu()
    return broadcast_object(WidthChoice(widths[smallest_within_noise(right_WN)], widths, right_WN))


def ranks_in_class(label_N: Tensor) -> Tensor:
    """Return the number of each image within its class, from 0."""
    order_N = label_N.argsort(stable=True)
    count_K = label_N.bincount()
    first_K, rank_N = count_K.cumsum(0) - count_K, torch.empty_like(label_N)
    rank_N[order_N] = torch.arange(len(label_N), device=label_N.device) - first_K[label_N[order_N]]
    return rank_N


def held_out_fold(label_N: Tensor, folds: int) -> Tensor:
    """Return the fold that each image is held out with, classes spread evenly; -1 for the only image of a class, which
    prototypes cannot do without."""
    alone_N = label_N.bincount()[label_N] == 1
    return torch.where(alone_N, -1, ranks_in_class(label_N) % folds)


def model_on_maps(
    baseline: BaselineClassifier, maps: FeatureMaps, parts: Parts, config: Config, width: int
) -> ProtoPNet:
    """Return a ProtoPNet with prototypes chosen among these maps, as the choose stage does."""
    classes = baseline.head.out_features
    height, columns = baseline.backbone.map_size
    patch_K = maps.label_N.bincount(minlength=classes) * height * columns
    counts = patch_K.clamp(max=config.model.prototypes_per_class).tolist()
    model = ProtoPNet(baseline.backbone, replace(config.model, latent_width=width), counts).to(maps.device)
    start_from_baseline(model, baseline, maps, parts, config.train.add_on_start)
    return model


def classify_maps(model: ProtoPNet, maps: FeatureMaps) -> Tensor:
    """Return the logits of every map, N x K."""
    head = model.prototype_layer, model.last_layer.weight
    latents = ((index_B, model.add_on(map_BCHW)) for index_B, map_BCHW, _ in own_batches_of(maps))
    return logits_by([head], latents, len(maps), maps.device)[0]


def smallest_within_noise(right_WN: Tensor) -> int:
    """Return the first row whose mean is at most `NOISE` standard errors of the difference below the best row's."""
    value_WN = right_WN.cpu().double()
    best = int(value_WN.mean(1).argmax())
    for number in range(best):
        short_N = value_WN[best] - value_WN[number]
        if float(short_N.mean()) <= NOISE * float(short_N.std()) / len(short_N) ** 0.5:
            return number
    return best


def describe_choice(choice: WidthChoice) -> str:
    if not choice.widths:
        return f"latent width: {choice.chosen}, with no other to compare it with"
    shown = ", ".join(f"{share:.1%} with {width}" for width, share in choice.accuracy().items())
    return f"latent width: {choice.chosen}; accuracy on left-out training images {shown}"
