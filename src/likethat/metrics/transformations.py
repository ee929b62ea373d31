"""Does the box move with the picture, and stay under another light?

Definition (ours): the picture is flipped left to right, shifted by 1/16 of both sides, turned by 10 degrees and
enlarged by 1.15 (geometric), or made darker, flatter and paler (light). For the three prototypes with most points:
the overlap (intersection over union) of the box in the changed picture with the box before, moved as the picture was;
the change of the similarity, as a share of what it was; and whether the prediction stays. Means over the sorts of
change, by picture.

Limits: a box covers whole cells of the map, so a shift by less than a cell cannot be followed exactly; even a perfect
network stays below 1 there, but not under the flip. A turned box is compared by the upright box around it. Places
that come into the picture are filled by reflection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.data.augment import recolour
from likethat.metrics.figure import MetricFigure
from likethat.metrics.response import Responses, respond
from likethat.metrics.sweep import Batch, Metric, Subject

SHIFT, DEGREES, ZOOM = 1 / 16, 10.0, 1.15
GROUP = "under change"
# Factors of brightness, contrast and saturation.
LIGHTS = {"darker": (0.75, 1.0, 1.0), "flatter": (1.0, 0.7, 1.0), "paler": (1.0, 1.0, 0.4)}


def about_the_middle(matrix_22: Tensor) -> Tensor:
    """Return the linear map that keeps the picture's middle where it was: 2 x 3."""
    middle_2 = torch.tensor([0.5, 0.5])
    return torch.cat([matrix_22, (middle_2 - matrix_22 @ middle_2)[:, None]], 1)


def _moves() -> dict[str, Tensor]:
    cos, sin = math.cos(math.radians(DEGREES)), math.sin(math.radians(DEGREES))
    return {
        "flip": about_the_middle(torch.tensor([[-1.0, 0.0], [0.0, 1.0]])),
        "shift": torch.tensor([[1.0, 0.0, SHIFT], [0.0, 1.0, SHIFT]]),
        "turn": about_the_middle(torch.tensor([[cos, -sin], [sin, cos]])),
        "zoom": about_the_middle(torch.eye(2) * ZOOM),
    }


MOVES = _moves()  # from a place in the picture, in shares, to its place in the changed one


def warp(x_B3HW: Tensor, move_23: Tensor) -> Tensor:
    """Move every place of the picture so."""
    back_22 = torch.linalg.inv(move_23[:, :2])
    back_23 = torch.cat([back_22, -back_22 @ move_23[:, 2:]], 1)
    # grid_sample counts from -1 to 1: g = 2 u - 1.
    shift_2 = 2 * back_23[:, 2] + back_22.sum(1) - 1
    theta_B23 = torch.cat([back_22, shift_2[:, None]], 1).to(x_B3HW).expand(len(x_B3HW), 2, 3)
    grid_BHW2 = F.affine_grid(theta_B23, list(x_B3HW.shape), align_corners=False)
    return F.grid_sample(x_B3HW, grid_BHW2, mode="bilinear", padding_mode="reflection", align_corners=False)


class Transformations(Metric):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.moved = Responses("picture moved", GROUP, "this project")
        self.lit = Responses("other light", GROUP, "this project")

    def collect(self, batch: Batch) -> None:
        if not batch.perturbed:
            return
        for name, move_23 in MOVES.items():
            after = batch.read([warp(x_B3HW, move_23) for x_B3HW in batch.x])
            self.moved.add(name, respond(batch, after, move_23))
        for name, factors in LIGHTS.items():
            factor_B3 = torch.tensor(factors, device=batch.device).expand(len(batch), 3)
            after = batch.read([recolour(x_B3HW, factor_B3) for x_B3HW in batch.x])
            self.lit.add(name, respond(batch, after))

    def figures(self) -> list[MetricFigure]:
        note = self.subject.sample_note(self.subject.perturbed)
        return [*self.moved.figures(note), *self.lit.figures(note)]

    def by_prototype(self) -> Mapping[str, Tensor]:
        return {"moves with the picture": self.moved.overlap_P(len(self.subject.class_P))}
