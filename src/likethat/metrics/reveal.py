"""Pictures of which only some boxes are shown, or all but some: what deletion, insertion and leakage look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from likethat.metrics.regions import box_masks
from likethat.metrics.sweep import Batch, Metric, Subject
from likethat.runtime import seed_for

STEPS = (1, 2, 3, 5, 10)  # boxes shown or hidden, most points first
BLUR = 1 / 12  # of the side: standard deviation of the blur that hides


def blurred(x_B3HW: Tensor) -> Tensor:
    """Blur so much that no part can be told, but colours and light stay; rows of the Gaussian add up to one."""
    height, width = x_B3HW.shape[2:]
    return _gaussian(height, x_B3HW) @ x_B3HW @ _gaussian(width, x_B3HW).T


def _gaussian(size: int, like: Tensor) -> Tensor:
    place_n = torch.arange(size, device=like.device, dtype=like.dtype)
    weight_nn = torch.exp(-((place_n[:, None] - place_n) ** 2) / (2 * (BLUR * size) ** 2))
    return weight_nn / weight_nn.sum(1, keepdim=True)


def elsewhere(box_BE4: Tensor, generator: torch.Generator) -> Tensor:
    """Return boxes of the same sizes at random places inside the picture."""
    size_BE2 = box_BE4[..., 2:] - box_BE4[..., :2]
    corner_BE2 = torch.rand(size_BE2.shape, generator=generator).to(size_BE2) * (1 - size_BE2)
    return torch.cat([corner_BE2, corner_BE2 + size_BE2], -1)


def unions(box_BE4: Tensor, counts_BE: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """Return a mask, L, B, height, width: true where one of the first boxes lies, for each of STEPS."""
    mask_BEHW = box_masks(box_BE4, size_hw) & counts_BE[..., None, None]
    return torch.stack([mask_BEHW[:, :count].any(1) for count in STEPS])


@dataclass(frozen=True)
class Curve:
    """The predicted class of the whole picture, at each of STEPS."""

    probability_LB: Tensor
    kept_LB: Tensor  # whether it is still the prediction
    area_LB: Tensor  # share of the picture in the boxes


@dataclass(frozen=True)
class Revealed:
    """Pictures with evidence only."""

    before_B: Tensor  # probability of the predicted class
    shown: Curve  # the boxes of the evidence on a blurred picture
    hidden: Curve  # blurred boxes on the picture
    random_shown: Curve
    random_hidden: Curve


def reveal(batch: Batch) -> Revealed:
    evidence = batch.evidence
    rows = evidence.counts_BE[:, 0].nonzero()[:, 0]
    box_BE4, counts_BE = evidence.box_BE4[rows], evidence.counts_BE[rows]
    generator = torch.Generator().manual_seed(seed_for("random boxes", int(batch.index_B[0])))
    random_BE4 = elsewhere(box_BE4, generator)
    blur = [blurred(x_B3HW[rows]) for x_B3HW in batch.x]
    curves = [
        _curve(batch, rows, boxes_BE4, counts_BE, blur, show=show)
        for boxes_BE4 in (box_BE4, random_BE4)
        for show in (True, False)
    ]
    probability_BK = batch.clean.logits_BK[rows].softmax(1)
    before_B = probability_BK.gather(1, batch.predicted_B[rows, None])[:, 0].cpu()
    return Revealed(before_B, *curves)


def _curve(batch: Batch, rows: Tensor, box_BE4: Tensor, counts_BE: Tensor, blur: list[Tensor], *, show: bool) -> Curve:
    union = [unions(box_BE4, counts_BE, (x_B3HW.shape[2], x_B3HW.shape[3])) for x_B3HW in blur]
    predicted_B1 = batch.predicted_B[rows, None]
    probabilities, kept = [], []
    for step in range(len(STEPS)):
        x = [
            torch.where(mask_LBHW[step][:, None] == show, x_B3HW[rows], blur_B3HW)
            for x_B3HW, blur_B3HW, mask_LBHW in zip(batch.x, blur, union, strict=True)
        ]
        logits_BK = batch.read(x).logits_BK
        probabilities.append(logits_BK.softmax(1).gather(1, predicted_B1)[:, 0].cpu())
        kept.append((logits_BK.argmax(1) == predicted_B1[:, 0]).cpu())
    area_LB = union[0].float().mean((2, 3)).cpu()
    return Curve(torch.stack(probabilities), torch.stack(kept), area_LB)


class Revealing(Metric):
    """What metrics of shown and hidden boxes share: the curves of all perturbed pictures, made once a batch."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.seen: list[Revealed] = []

    def collect(self, batch: Batch) -> None:
        if batch.perturbed:
            self.seen.append(batch.once("revealed", reveal))
