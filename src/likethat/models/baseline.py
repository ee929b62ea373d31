"""The plain counterpart of a ProtoPNet: the same backbone, global average pooling and a linear layer."""

from __future__ import annotations

from torch import Tensor, nn

from likethat.models.backbone import Backbone


class PlainClassifier(nn.Module):
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
