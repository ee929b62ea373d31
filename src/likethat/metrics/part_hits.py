"""How often each prototype lands on each annotated part of the pictures of its own class."""

from __future__ import annotations

import torch
from torch import Tensor

from likethat.metrics.regions import Reading, centres, peaks_in
from likethat.metrics.sweep import Batch, Metric, Subject

HALF_PIXELS = 36  # at a side of 224: from the most active pixel to the rim of its square (Huang et al. 2023)
HALF_REGION = HALF_PIXELS / 224  # of the picture
ROUNDING = 1e-4  # pixels: what is less than this below a whole number is that number
NO_PARTS = "the data has no part annotations"


def parts_in_region(reading: Reading, image_S: Tensor, prototype_S: Tensor, part_BQ4: Tensor) -> Tensor:
    """S x Q: True where the part lies in the square around the prototype's most active pixel; never a hidden part."""
    inside_SQ = torch.zeros(len(image_S), part_BQ4.shape[1], dtype=torch.bool, device=part_BQ4.device)
    for network, mine, map_sHW in reading.maps(image_S, prototype_S):
        size_hw = network.backbone.input_size
        side_2 = torch.tensor([size_hw[1], size_hw[0]], device=map_sHW.device)
        pixel_s2 = (peaks_in(network, map_sHW) * side_2).floor()
        inside_SQ[mine] = in_squares(pixel_s2, part_BQ4[image_S[mine]], size_hw)
    return inside_SQ


def in_squares(pixel_S2: Tensor, part_SQ4: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """S x Q: True where the part is at most HALF_REGION of the side away from the pixel along both axes, both counted
    in whole pixels as the authors do, and in the picture."""
    side_2 = torch.tensor([size_hw[1], size_hw[0]], device=part_SQ4.device)
    place_SQ2 = (centres(part_SQ4) * side_2 + ROUNDING).trunc()
    near_SQ2 = (place_SQ2 - pixel_S2[:, None]).abs() <= HALF_REGION * side_2 + ROUNDING
    return (near_SQ2 & (place_SQ2 >= 0) & (place_SQ2 <= side_2)).all(2)


def square_note(subject: Subject) -> str:
    """Say how parts are looked for."""
    return f"{subject.view_note}, parts within {subject.pixels_note(HALF_PIXELS)} of the maximum of the bicubic map"


def own_parts(batch: Batch) -> Tensor:
    """Return the same for all prototypes of each image's own class, as `batch.own_pairs` lists them."""
    assert batch.part_BQ4 is not None
    return parts_in_region(batch.clean, *batch.own_pairs, batch.part_BQ4)


class PartHits(Metric):
    """What metrics of hit parts share: counts over all images seen, both P x Q."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        parts = 0 if subject.parts is None else len(subject.parts.names)
        self.hit_PQ = torch.zeros(len(subject.class_P), parts, dtype=torch.long)
        self.visible_PQ = torch.zeros_like(self.hit_PQ)

    def collect(self, batch: Batch) -> None:
        if batch.part_BQ4 is None:
            return
        image_S, prototype_S = batch.own_pairs
        inside_SQ = batch.once("own parts", own_parts)
        visible_SQ = ~batch.part_BQ4[image_S, :, 0].isnan()
        self.hit_PQ.index_add_(0, prototype_S.cpu(), inside_SQ.cpu().long())
        self.visible_PQ.index_add_(0, prototype_S.cpu(), visible_SQ.cpu().long())
