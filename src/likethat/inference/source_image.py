"""Prototypes do not judge the images that they were cut from."""

from __future__ import annotations

import torch
from torch import Tensor


def cut_elsewhere(image_BV: Tensor, source_P: Tensor) -> Tensor:
    """Return, B x P, whether a prototype comes from none of the V images that a picture shows."""
    return (source_P[None, None] != image_BV[:, :, None]).all(1)


def leave_source_out(score_BP: Tensor, image_BV: Tensor, source_P: Tensor, own_KP: Tensor) -> Tensor:
    """Give a prototype the mean score of its class mates on the image it was cut from, where its own says nothing.

    `image_BV` (the V images that each picture shows) and `source_P` are numbers of training images. Where all
    prototypes of a class come from those images, they keep their scores.
    """
    other_BP = cut_elsewhere(image_BV, source_P)
    member_KP = own_KP.to(score_BP)
    total_BK = (score_BP * other_BP) @ member_KP.T
    count_BK = other_BP.to(score_BP) @ member_KP.T
    class_P = own_KP.int().argmax(0)
    mates_BP = (total_BK / count_BK.clamp(min=1))[:, class_P]
    return torch.where(other_BP | (count_BK[:, class_P] == 0), score_BP, mates_BP)
