"""Distances between prototypes in the latent space, and prototypes that are the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from likethat.runs.classifier import Classifier

ROWS = 256  # of the matrix of distances in memory at a time
SAME = 1e-4  # of a prototype's mean length: what is nearer than this is the same prototype


@dataclass(frozen=True)
class Latent:
    within_class: float | None  # mean L2 distance of two prototypes of one class; None where there are no two
    between_classes: float | None
    first_same_P: tuple[int | None, ...]  # the first earlier prototype that is the same


@torch.no_grad()
def latent_space(classifier: Classifier) -> Latent:
    """Describe the latent space of each network. Prototypes of different networks are not compared."""
    total_2, pairs_2 = torch.zeros(2, dtype=torch.double), torch.zeros(2, dtype=torch.double)
    first_same: list[int | None] = []
    for member, model in enumerate(classifier.networks):
        layer = model.prototype_layer
        vector_PD = layer.vectors().cpu().double()
        place_P = _places(classifier, member)
        tolerance = SAME * float(vector_PD.norm(dim=1).mean())
        class_P, start_of_member = layer.class_P.cpu(), len(first_same)
        for start in range(0, len(vector_PD), ROWS):
            rows = torch.arange(start, min(start + ROWS, len(vector_PD)))
            distance_RP = torch.cdist(vector_PD[rows], vector_PD, compute_mode="donot_use_mm_for_euclid_dist")
            earlier_RP = torch.arange(len(vector_PD)) < rows[:, None]
            own_RP = class_P[rows, None] == class_P
            for number, chosen_RP in enumerate((earlier_RP & own_RP, earlier_RP & ~own_RP)):
                total_2[number] += distance_RP[chosen_RP].sum()
                pairs_2[number] += chosen_RP.sum()
            same_RP = earlier_RP & ((distance_RP <= tolerance) | (place_P[rows, None] == place_P))
            found_R = same_RP.any(1).tolist()
            first_R = same_RP.int().argmax(1).tolist()
            first_same += [
                start_of_member + first if found else None for found, first in zip(found_R, first_R, strict=True)
            ]
    within, between = (float(total / pairs) if pairs else None for total, pairs in zip(total_2, pairs_2, strict=True))
    return Latent(within, between, tuple(first_same))


def _places(classifier: Classifier, member: int) -> Tensor:
    """Return a number for the patch that each prototype was taken from; copies of a file count as the same."""
    own = [prototype for prototype in classifier.prototypes if prototype.member == member]
    numbers: dict[object, int] = {}
    keys = [(prototype.sha256, prototype.crop_to, prototype.row, prototype.column) for prototype in own]
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])
