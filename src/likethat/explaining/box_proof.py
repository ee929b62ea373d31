"""Proof that a similarity depends on nothing outside its box, for networks that see windows of a picture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from likethat.explaining.boxes import match_boxes
from likethat.models.protopnet import ProtoPNet

PICTURES, PROTOTYPES = 8, 16  # looked at, and compared in each of them, at most
MOST_CHANGE = 1e-5  # of a similarity; on one device the same numbers in the same places give the same bits


@dataclass(frozen=True)
class BoxProof:
    """What was compared, and the largest change of a similarity."""

    pictures: int
    prototypes: int
    max_change: float


def sample_prototypes(model: ProtoPNet, pictures: int) -> list[Tensor]:
    """Prototypes for each picture, spread over all of them."""
    count = len(model.prototype_layer.class_P)
    spread = torch.linspace(0, count - 1, pictures * PROTOTYPES).round().long()
    return [spread[number::pictures].unique() for number in range(pictures)]


@torch.no_grad()
def changes_by_outside(model: ProtoPNet, x_N3HW: Tensor, number: int, prototype_p: Tensor) -> Tensor:
    """Return how much the similarity of each of these prototypes to its patch of one picture changes when everything
    outside its box is replaced by pixels of the other pictures."""
    count = len(prototype_p)
    # As often as it will be changed: a batch of another shape may be rounded otherwise.
    x_p3HW = x_N3HW[number].expand(count, -1, -1, -1)
    before_pHW = _similarities(model, x_p3HW, prototype_p)
    inside_p1HW = torch.zeros_like(x_p3HW[:, :1], dtype=torch.bool)
    for own_1HW, (x0, y0, x1, y1) in zip(inside_p1HW, match_boxes(model, before_pHW), strict=True):
        own_1HW[:, int(y0) : int(y1), int(x0) : int(x1)] = True
    # Mirrored, so that even a single picture is another one.
    other_p = (number + 1 + torch.arange(count) % max(1, len(x_N3HW) - 1)) % len(x_N3HW)
    after_pHW = _similarities(model, torch.where(inside_p1HW, x_p3HW, x_N3HW[other_p].flip(3)), prototype_p)
    before_p, patch_p = before_pHW.flatten(1).max(1)
    return (after_pHW.flatten(1).gather(1, patch_p[:, None])[:, 0] - before_p).abs()


def _similarities(model: ProtoPNet, x_p3HW: Tensor, prototype_p: Tensor) -> Tensor:
    """Return the map of one prototype in each picture."""
    output = model(x_p3HW)
    everyone_p = torch.arange(len(prototype_p), device=x_p3HW.device)
    return output.of_distance(output.distance_BPHW[everyone_p, prototype_p.to(x_p3HW.device)])
