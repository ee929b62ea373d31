"""Which way of locating a prototype finds the pixels that its similarity depends on?

Definition (after Petsiuk et al. 2018, as `deletion`, but of one prototype's similarity and pixel by pixel): the pixels
of a picture are removed in the order of an attribution map, most first; the curve is the similarity that is left, as a
share of what it was. The lower it is, the better were the pixels chosen. What removing does to a picture by itself
shows in a random order of patches.

Limits: a prototype that finds its part a second time in the picture keeps its similarity until that is gone, too.
Another filling gives other numbers; `flat` favours methods that look at the picture with that filling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from likethat.explaining.attribution import BATCH
from likethat.explaining.boxes import upsample
from likethat.models.protopnet import ProtoPNet


@torch.no_grad()
def deletion_curves(
    network: ProtoPNet,
    x_3HW: Tensor,
    chosen_p: Tensor,
    map_pHW: Tensor,
    shares: Sequence[float],
    filling_3HW: Tensor,
) -> Tensor:
    """p x shares: the similarity of each chosen prototype, by what it was, when that share of the pixels is removed in
    the order of its map."""
    height, width = x_3HW.shape[1:]
    pixel_pN = upsample(map_pHW.to(x_3HW).float(), (height, width)).flatten(1)
    rank_pN = pixel_pN.argsort(dim=1, descending=True, stable=True).argsort(1)
    removed_q = (torch.tensor(shares) * height * width).round().long().to(x_3HW.device)
    gone_pqN = rank_pN[:, None] < removed_q[:, None]
    gone_BHW = gone_pqN.flatten(0, 1).unflatten(1, (height, width))
    score_BP = torch.cat(
        [
            network(torch.where(gone[:, None], filling_3HW, x_3HW)).score_BP
            for gone in gone_BHW.split(BATCH[x_3HW.device.type])
        ]
    )
    left_pq = score_BP.unflatten(0, gone_pqN.shape[:2])[torch.arange(len(chosen_p)), :, chosen_p]
    return left_pq / network(x_3HW[None]).score_BP[0, chosen_p, None]
