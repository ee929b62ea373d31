"""Passes over images with a model that does not move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from likethat.config import Config
from likethat.data.loaders import Images, one_view_each
from likethat.distributed import join, own_part
from likethat.models.baseline import PlainClassifier
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Advance
from likethat.runtime import seed_for, send

EVAL_BATCH = 64

Batches = Iterator[tuple[Tensor, Tensor, Tensor]]  # numbers of the images, pictures, labels


def mixed_precision(device: torch.device) -> AbstractContextManager[object]:
    """bf16 where it pays (CUDA). Only gradient descent uses it; everything that must be exact runs in fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def batches_of(images: Images, advance: Advance | None = None) -> Batches:
    """Unaugmented pictures in order: index, pictures, labels."""
    return _batches(images, slice(0, len(images)), advance)


def own_batches_of(images: Images, advance: Advance | None = None) -> Batches:
    """Those that this process sees to, of several that share a pass."""
    return _batches(images, own_part(len(images), EVAL_BATCH), advance)


def _batches(images: Images, part: slice, advance: Advance | None) -> Batches:
    for start in range(part.start, part.stop, EVAL_BATCH):
        index_B = torch.arange(start, min(start + EVAL_BATCH, part.stop))
        yield (index_B, *images.batch(index_B))
        if advance:
            advance(int(index_B[-1]) + 1 - part.start, part.stop - part.start)


def last_layer_images(train: Images, config: Config) -> Images:
    """What the last layer learns from: a view of every training image. The pictures themselves are known by heart, so
    connections learned from them are too sure of themselves."""
    return one_view_each(train, config.augment, seed_for(config.train.seed, "last layer"))


@torch.no_grad()
def score_images(model: ProtoPNet, images: Images, advance: Advance | None = None) -> Tensor:
    """The similarity scores of every image, N x P: all that the last layer and its evaluation need."""
    return join_scores(model, own_batches_of(images, advance), len(images), images.device)


@torch.no_grad()
def classify_images(model: PlainClassifier, images: Images, advance: Advance | None = None) -> Tensor:
    """The logits of a plain classifier, N x K."""
    return join_logits(model, own_batches_of(images, advance), len(images), images.device)


def join_scores(model: ProtoPNet, batches: Batches, count: int, device: torch.device) -> Tensor:
    """Of `count` images, of which this process has these batches and others have theirs."""
    model.eval()
    score_NP = torch.zeros(count, len(model.prototype_layer.class_P), device=device)
    for index_B, x_B3HW, _ in batches:
        score_NP[send(index_B, device)] = model(x_B3HW).score_BP
    return join(score_NP)


def join_logits(model: PlainClassifier, batches: Batches, count: int, device: torch.device) -> Tensor:
    model.eval()
    logits_NK = torch.zeros(count, model.head.out_features, device=device)
    for index_B, x_B3HW, _ in batches:
        logits_NK[send(index_B, device)] = model(x_B3HW).float()
    return join(logits_NK)


def accuracy(logits_NK: Tensor, label_N: Tensor) -> float:
    return float((logits_NK.argmax(1) == label_N).cpu().double().mean())


def measure(logits_NK: Tensor, label_N: Tensor) -> dict[str, float]:
    return {
        "accuracy": accuracy(logits_NK, label_N),
        "cross_entropy": float(nn.functional.cross_entropy(logits_NK.cpu().double(), label_N.cpu())),
    }
