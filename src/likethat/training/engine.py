"""One training step, and passes over images with a model that does not move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from likethat.config import AugmentConfig
from likethat.data.augment import augment
from likethat.data.loaders import Images, plain_batches
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Advance
from likethat.runtime import send
from likethat.training.losses import Costs

EVAL_BATCH = 64


def mixed_precision(device: torch.device) -> AbstractContextManager[object]:
    """bf16 where it pays (CUDA). Only gradient descent uses it; everything that must be exact runs in fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def train_step(
    optimizer: torch.optim.Optimizer,
    costs_of: Callable[[Tensor, Tensor, Tensor], Costs],
    images: Images,
    index_B: Tensor,
    augment_config: AugmentConfig,
    seed: int,
) -> Costs:
    """All randomness of the step (augmentation, dropout) follows from `seed`. Nothing in it waits for the device."""
    torch.manual_seed(seed)
    x_B3HW, label_B = images.batch(index_B)
    x_B3HW = augment(x_B3HW, augment_config, torch.Generator().manual_seed(seed))
    with mixed_precision(images.device):
        costs = costs_of(x_B3HW, label_B, send(index_B, images.device))
    optimizer.zero_grad(set_to_none=True)
    costs["loss"].backward()
    optimizer.step()
    return {name: value.detach() for name, value in costs.items()}


def batches_of(images: Images, advance: Advance | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Unaugmented pictures in order: index, pictures, labels."""
    for index_B in plain_batches(len(images), EVAL_BATCH):
        yield (index_B, *images.batch(index_B))
        if advance:
            advance(int(index_B[-1]) + 1, len(images))


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
