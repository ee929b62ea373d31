"""Passes over images with a model that does not move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from likethat.config import Config
from likethat.data.loaders import Images, one_view_each, plain_batches
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Advance
from likethat.runtime import seed_for

EVAL_BATCH = 64


def mixed_precision(device: torch.device) -> AbstractContextManager[object]:
    """bf16 where it pays (CUDA). Only gradient descent uses it; everything that must be exact runs in fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def batches_of(images: Images, advance: Advance | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Unaugmented pictures in order: index, pictures, labels."""
    for index_B in plain_batches(len(images), EVAL_BATCH):
        yield (index_B, *images.batch(index_B))
        if advance:
            advance(int(index_B[-1]) + 1, len(images))


def last_layer_images(train: Images, config: Config) -> Images:
    """What the last layer learns from: a view of every training image. The pictures themselves are known by heart, so
    connections learned from them are too sure of themselves."""
    return one_view_each(train, config.augment, seed_for(config.train.seed, "last layer"))


@torch.no_grad()
def score_images(model: ProtoPNet, images: Images, advance: Advance | None = None) -> Tensor:
    """The similarity scores of every image, N x P: all that the last layer and its evaluation need."""
    model.eval()
    return torch.cat([model(x_B3HW).score_BP for _, x_B3HW, _ in batches_of(images, advance)])


@torch.no_grad()
def classify_images(model: nn.Module, images: Images, advance: Advance | None = None) -> Tensor:
    """The logits of a plain classifier, N x K."""
    model.eval()
    return torch.cat([model(x_B3HW) for _, x_B3HW, _ in batches_of(images, advance)])


def accuracy(logits_NK: Tensor, label_N: Tensor) -> float:
    return float((logits_NK.argmax(1) == label_N).cpu().double().mean())


def measure(logits_NK: Tensor, label_N: Tensor) -> dict[str, float]:
    return {
        "accuracy": accuracy(logits_NK, label_N),
        "cross_entropy": float(nn.functional.cross_entropy(logits_NK.cpu().double(), label_N.cpu())),
    }
