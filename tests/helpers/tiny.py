"""A small real network and small images."""

from __future__ import annotations

import torch

from likethat.config.presets import resolve
from likethat.data.loaders import Images
from likethat.models.protopnet import ProtoPNet, create_protopnet


def tiny_model(prototypes_of_class: list[int], **options: object) -> ProtoPNet:
    """Return a ProtoPNet on timm's smallest ResNet, random weights, 3x3 map."""
    settings = {"backbone": "test_resnet", "weights": "none", "input_size": 96, "latent_width": 16, **options}
    return create_protopnet(resolve("paper", **settings).model, prototypes_of_class)


def random_images(count: int, classes: int, size: int = 96) -> Images:
    pixels = (torch.rand(count, size, size, 3) * 255).byte()
    labels = torch.arange(count) % classes
    return Images(pixels, labels, torch.device("cpu"))
