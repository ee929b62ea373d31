"""The baseline's linear layer on a frozen backbone: a convex problem on pooled features, solved instead of trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.data.loaders import Images
from likethat.distributed import broadcast_tensor, gather_rows
from likethat.inference.feature_maps import FeatureMaps, own_features_of
from likethat.models.baseline import BaselineClassifier
from likethat.progress import Advance
from likethat.runtime import send, wide

DECAY = 1e-4  # of the weights, on features whose squared length is 1 on average
MOST_ITERATIONS = 200
TOLERANCE = 1e-5  # largest derivative of the mean cost


@torch.no_grad()
def fit_head(
    baseline: BaselineClassifier,
    images: Images | FeatureMaps,
    smoothing: float,
    weight_N: Tensor | None = None,
    advance: Advance | None = None,
) -> None:
    """Set the head to the one that classifies the pooled features of these images best, by how much each counts."""
    baseline.eval()
    pooled_NC = torch.zeros(len(images), baseline.backbone.channels, device=images.device)
    for index_B, feature_BCHW, _ in own_features_of(baseline.backbone, images, advance):
        pooled_NC[send(index_B, images.device)] = feature_BCHW.mean((2, 3))
    data = (gather_rows(pooled_NC), images.label_N, baseline.head.out_features)
    weight_KC, bias_K = solve_head(*data, smoothing, weight_N)
    for parameter, value in ((baseline.head.weight, weight_KC), (baseline.head.bias, bias_K)):
        parameter.copy_(value)
        broadcast_tensor(parameter)


def solve_head(
    feature_NC: Tensor, label_N: Tensor, classes: int, smoothing: float, weight_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights and biases with the least mean cross entropy with smoothed labels, weights decayed.

    Features are centred, and scaled together, so that the decay means the same on every backbone.
    """
    wide_NC = wide(feature_NC)
    mean_C, label_N = wide_NC.mean(0), label_N.to(wide_NC.device)
    centred_NC = wide_NC - mean_C
    scale = centred_NC.square().sum(1).mean().sqrt().clamp(min=1e-12)
    centred_NC = centred_NC / scale
    weight_KC = centred_NC.new_zeros(classes, feature_NC.shape[1], requires_grad=True)
    bias_K = centred_NC.new_zeros(classes, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weight_KC, bias_K], max_iter=MOST_ITERATIONS, tolerance_grad=TOLERANCE, line_search_fn="strong_wolfe"
    )

    @torch.enable_grad()
    def cost() -> Tensor:
        solver.zero_grad()
        logits_NK = F.linear(centred_NC, weight_KC, bias_K)
        entropy_N = F.cross_entropy(logits_NK, label_N, label_smoothing=smoothing, reduction="none")
        entropy = (entropy_N if weight_N is None else entropy_N * weight_N.to(entropy_N)).mean()
        loss = entropy + DECAY / 2 * weight_KC.square().sum()
        loss.backward()
        return loss

    solver.step(cost)
    weight_KC = weight_KC.detach() / scale
    return weight_KC.to(feature_NC), (bias_K.detach() - weight_KC @ mean_C).to(feature_NC)
