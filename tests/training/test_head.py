"""The baseline's linear layer on a frozen backbone is the optimum of what it says it minimises."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from helpers.tiny import random_images, tiny_model

from likethat.inference.feature_maps import keep_feature_maps
from likethat.models.baseline import BaselineClassifier
from likethat.training.head import DECAY, fit_head, solve_head


def test_the_head_is_the_optimum() -> None:
    """No derivative is left of the cost as it is defined, in the features as they came."""
    generator = torch.Generator().manual_seed(0)
    label_N = torch.arange(40) % 3
    feature_NC = 50 + 7 * torch.randn(40, 6, generator=generator).double()
    feature_NC[torch.arange(40), label_N] += 5
    weight_KC, bias_K = solve_head(feature_NC, label_N, 3, 0.1)
    scale = (feature_NC - feature_NC.mean(0)).square().sum(1).mean().sqrt()
    weight_KC.requires_grad_(True)
    bias_K.requires_grad_(True)
    entropy = F.cross_entropy(F.linear(feature_NC, weight_KC, bias_K), label_N, label_smoothing=0.1)
    cost = entropy + DECAY / 2 * (weight_KC * scale).square().sum()
    slope_KC, slope_K = torch.autograd.grad(cost, [weight_KC, bias_K])
    centred_KC = (slope_KC - slope_K[:, None] * feature_NC.mean(0)) / scale  # the slope where it was solved
    assert float(centred_KC.abs().max()) < 1e-5
    assert float(slope_K.abs().max()) < 1e-5
    assert float((F.linear(feature_NC, weight_KC, bias_K).argmax(1) == label_N).double().mean()) > 0.6


def test_kept_maps_give_the_head_that_pictures_give() -> None:
    model, images = tiny_model([2] * 3, add_on="linear").eval(), random_images(12, 3)
    heads = []
    for shown in (images, keep_feature_maps(model.backbone, images, torch.arange(12))):
        baseline = BaselineClassifier(model.backbone, 3)
        fit_head(baseline, shown, 0.1)
        heads.append(baseline)
    assert torch.equal(heads[0].head.weight, heads[1].head.weight)
    logits_NK = heads[0](images.batch(torch.arange(12))[0])
    assert torch.equal(logits_NK.argmax(1), images.label_N), "six pictures of noise more than it has classes"
