"""The baseline of a ProtoPNet: the same backbone with global average pooling and a linear layer."""

from __future__ import annotations

from torch import Tensor, nn

from likethat.config.settings import ModelConfig
from likethat.models.backbone import Backbone, configured_backbone
from likethat.models.protopnet import create_layers


class BaselineClassifier(nn.Module):
    """Takes pictures in [0, 1]; gives logits. Its logit is the mean of its logits on single patches."""

    def __init__(self, backbone: Backbone, num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.channels, num_classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, x_B3HW: Tensor) -> Tensor:
        logits_BK: Tensor = self.head(self.backbone(x_B3HW).mean((2, 3)))
        return logits_BK


def create_baseline(config: ModelConfig, classes: int, *, weights: str | None = None) -> BaselineClassifier:
    """Return a baseline with the random weights that it would have on the backbone of a ProtoPNet. `weights` overrides
    the configured ones of the backbone."""
    backbone = configured_backbone(config, weights or config.weights)
    # Training a ProtoPNet draws these before the baseline's head. They are dropped.
    create_layers(config, backbone.channels, [config.prototypes_per_class] * classes)
    return BaselineClassifier(backbone, classes)
