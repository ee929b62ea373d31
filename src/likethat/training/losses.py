"""The costs of the paper's first training stage."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from likethat.config import TrainConfig
from likethat.models.protopnet import Output


def cluster_cost(min_distance_BP: Tensor, own_BP: Tensor) -> Tensor:
    """Mean distance of an image to the nearest prototype of its own class."""
    return min_distance_BP.masked_fill(~own_BP, float("inf")).amin(1).mean()


def separation_cost(min_distance_BP: Tensor, own_BP: Tensor) -> Tensor:
    """Minus the mean distance of an image to the nearest prototype of another class."""
    return -min_distance_BP.masked_fill(own_BP, float("inf")).amin(1).mean()


def protopnet_costs(output: Output, label_B: Tensor, own_KP: Tensor, config: TrainConfig) -> dict[str, Tensor]:
    """Every cost by name; 'loss' is what gradient descent minimises."""
    own_BP = own_KP[label_B]
    costs = {
        "cross_entropy": F.cross_entropy(output.logits_BK, label_B),
        "cluster": cluster_cost(output.min_distance_BP, own_BP),
        "separation": separation_cost(output.min_distance_BP, own_BP),
    }
    costs["loss"] = (
        costs["cross_entropy"] + config.cluster * costs["cluster"] + config.separation * costs["separation"]
    )
    return costs
