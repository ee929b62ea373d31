"""ProtoPNet: backbone, add-on layers, prototype layer, last layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from likethat.config.settings import AUTO_WIDTH, ModelConfig
from likethat.errors import UserError
from likethat.models.backbone import Backbone, configured_backbone
from likethat.models.prototypes import DistanceMaps, PrototypeLayer

OWN_WEIGHT, OTHER_WEIGHT = 1.0, -0.5  # first connections of a prototype, as published


@dataclass
class Output:
    """What a forward pass gives: logits, one score a prototype, and the distance maps behind them."""

    logits_BK: Tensor
    score_BP: Tensor
    min_distance_BP: Tensor
    maps: DistanceMaps
    of_distance: Callable[[Tensor], Tensor]

    @cached_property
    def distance_BPHW(self) -> Tensor:
        """Compute the distances when they are asked for, since training does not need them."""
        return self.maps.distances()

    @property
    def similarity_BPHW(self) -> Tensor:
        """Return the activation maps."""
        return self.of_distance(self.distance_BPHW)

    def one(self, number: int) -> Output:
        """Return what the pass gives for one of the pictures, as a batch of its own."""
        only = slice(number, number + 1)
        return replace(
            self,
            logits_BK=self.logits_BK[only],
            score_BP=self.score_BP[only],
            min_distance_BP=self.min_distance_BP[only],
            maps=replace(self.maps, start_BPHW=self.maps.start_BPHW[only]),
        )


def logits_of_scores(score_BP: Tensor, weight_KP: Tensor) -> Tensor:
    """Return the logits, B x K, that a last layer makes of similarity scores; autocast does not touch them."""
    with torch.autocast(score_BP.device.type, enabled=False):
        return F.linear(score_BP, weight_KP)


def summed_logits(outputs: Sequence[Output]) -> Tensor:
    """Return the logits of networks that judge together, B x K."""
    return torch.stack([output.logits_BK for output in outputs]).sum(0)


class ProtoPNet(nn.Module):
    """Takes pictures in [0, 1] of shape B, 3, height, width; gives an `Output`."""

    def __init__(self, backbone: Backbone, config: ModelConfig, prototypes_of_class: list[int]) -> None:
        super().__init__()
        self.backbone = backbone
        height, width = backbone.map_size
        h, w = config.prototype_shape
        if h > height or w > width:
            raise UserError(
                f"Prototypes of {h}x{w} do not fit the {height}x{width} map of {backbone.name}; "
                "use a smaller --prototype-shape or a larger --input-size."
            )
        self.prototypes_of_class, self.box_margin = tuple(prototypes_of_class), config.box_margin
        layers = create_layers(config, backbone.channels, prototypes_of_class)
        self.add_on, self.prototype_layer, self.last_layer = layers
        reset_last_layer(self, OWN_WEIGHT, OTHER_WEIGHT)

    @property
    def num_classes(self) -> int:
        return self.last_layer.out_features

    @property
    def patch_grid(self) -> tuple[int, int]:
        """Return how many rows and columns of patches a prototype is compared with."""
        height, width = self.backbone.map_size
        h, w = self.prototype_layer.window
        return height - h + 1, width - w + 1

    @property
    def own_KP(self) -> Tensor:
        """Return a mask that is true where a prototype belongs to the class."""
        class_P = self.prototype_layer.class_P
        return torch.arange(self.num_classes, device=class_P.device)[:, None] == class_P[None]

    def latent(self, x_B3HW: Tensor) -> Tensor:
        return self.add_on(self.backbone(x_B3HW))

    def forward(self, x_B3HW: Tensor) -> Output:
        return self.head(self.latent(x_B3HW))

    def head(self, z_BDHW: Tensor) -> Output:
        maps = self.prototype_layer(z_BDHW)
        # Similarity falls with distance, so the largest similarity is that of the smallest distance.
        min_distance_BP = maps.smallest()
        of_distance = self.prototype_layer.similarity.of_distance
        score_BP = of_distance(min_distance_BP)
        logits_BK = logits_of_scores(score_BP, self.last_layer.weight)
        return Output(logits_BK, score_BP, min_distance_BP, maps, of_distance)


def create_layers(
    config: ModelConfig, channels: int, prototypes_of_class: list[int]
) -> tuple[nn.Sequential, PrototypeLayer, nn.Linear]:
    """Return what follows a backbone, with random weights: add-on, prototypes and last layer."""
    width = 1 if config.latent_width == AUTO_WIDTH else config.latent_width  # until the run sets the one it chooses
    if config.add_on == "linear":
        width = min(width, channels)  # a linear map into more channels than there are would only repeat them
    add_on = create_add_on(config.add_on, channels, width)
    class_of_prototype = [k for k, count in enumerate(prototypes_of_class) for _ in range(count)]
    prototypes = PrototypeLayer(class_of_prototype, width, config.prototype_shape, config.similarity)
    return add_on, prototypes, nn.Linear(len(class_of_prototype), len(prototypes_of_class), bias=False)


def create_add_on(kind: str, channels: int, width: int) -> nn.Sequential:
    """Create two 1x1 convolutions with ReLU and a final sigmoid ('regular'), a chain that halves the width
    ('bottleneck'), or a single convolution ('linear'), which keeps what a baseline's patches are made of."""
    layers: list[nn.Module] = []
    if kind == "regular":
        layers = [nn.Conv2d(channels, width, 1), nn.ReLU(), nn.Conv2d(width, width, 1), nn.Sigmoid()]
    elif kind == "bottleneck":
        current = channels
        while current > width or not layers:
            following = max(width, current // 2)
            layers += [nn.Conv2d(current, following, 1), nn.ReLU(), nn.Conv2d(following, following, 1)]
            layers.append(nn.ReLU() if following > width else nn.Sigmoid())
            current = following
    else:
        layers = [nn.Conv2d(channels, width, 1)]
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return nn.Sequential(*layers)


def reset_last_layer(model: ProtoPNet, own_weight: float, other_weight: float) -> None:
    with torch.no_grad():
        own_KP = model.own_KP.to(model.last_layer.weight)
        model.last_layer.weight.copy_(own_weight * own_KP + other_weight * (1 - own_KP))


def set_latent_width(model: ProtoPNet, width: int) -> None:
    """Set another D in a model whose add-on and prototypes are still to be set; the add-on is 'linear'."""
    layer = model.prototype_layer
    count, old, h, w = layer.prototype_PDhw.shape
    if width != old:
        device = layer.prototype_PDhw.device
        model.add_on = create_add_on("linear", model.backbone.channels, width).to(device)
        layer.prototype_PDhw = nn.Parameter(torch.zeros(count, width, h, w, device=device))
        layer.unprojected_PDhw = torch.zeros_like(layer.prototype_PDhw.detach())


def create_protopnet(config: ModelConfig, prototypes_of_class: list[int], *, weights: str | None = None) -> ProtoPNet:
    """Create a ProtoPNet. `weights` overrides the configured ones; 'none' when a state dict is loaded afterwards."""
    backbone = configured_backbone(config, weights or config.weights)
    return ProtoPNet(backbone, config, prototypes_of_class)
