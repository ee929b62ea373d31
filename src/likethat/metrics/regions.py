"""Where prototypes land in a picture. All places are shares of what the network sees: x and y from 0 to 1, so that
networks with different inputs, maps and members of a combined run are measured alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from likethat.explaining.boxes import cell_boxes, chunks, upsample, whole_map
from likethat.models.protopnet import Output, ProtoPNet, summed_logits


@dataclass(frozen=True)
class Reading:
    """What all networks of a run make of a batch; prototypes are numbered through the members."""

    networks: Sequence[ProtoPNet]
    outputs: Sequence[Output]

    @cached_property
    def logits_BK(self) -> Tensor:
        return summed_logits(self.outputs)

    @cached_property
    def score_BP(self) -> Tensor:
        return torch.cat([output.score_BP for output in self.outputs], 1)

    def peaks(self, image_S: Tensor, prototype_S: Tensor) -> Tensor:
        """S x 2: the most active pixel of each prototype in each image (x, y)."""
        return self._places(image_S, prototype_S, 2, peaks_in)

    def boxes(self, image_S: Tensor, prototype_S: Tensor) -> Tensor:
        """S x 4: the boxes that explanations show (x0, y0, x1, y1)."""
        return self._places(image_S, prototype_S, 4, boxes_in)

    def _places(
        self, image_S: Tensor, prototype_S: Tensor, width: int, of_maps: Callable[[ProtoPNet, Tensor], Tensor]
    ) -> Tensor:
        place_S4 = self.logits_BK.new_zeros(len(image_S), width)
        for network, mine, map_SHW in self.maps(image_S, prototype_S):
            place_S4[mine] = of_maps(network, map_SHW)
        return place_S4

    def maps(self, image_S: Tensor, prototype_S: Tensor) -> Iterator[tuple[ProtoPNet, Tensor, Tensor]]:
        """Yield every member with some of these prototypes: the network, which of the S they are, similarity maps."""
        start = 0
        for network, output in zip(self.networks, self.outputs, strict=True):
            count = output.score_BP.shape[1]
            if len(self.networks) == 1:  # nobody needs to wait for the device to learn whose prototypes they are
                mine = torch.arange(len(prototype_S), device=prototype_S.device)
            else:
                mine = ((prototype_S >= start) & (prototype_S < start + count)).nonzero()[:, 0]
            if len(mine):
                distance_SHW = output.maps.of_pairs(image_S[mine], prototype_S[mine] - start)
                yield network, mine, output.of_distance(distance_SHW)
            start += count


def peaks_in(network: ProtoPNet, map_SHW: Tensor) -> Tensor:
    """Return the most active pixels; the middle of the most active window, where a network sees windows."""
    if network.backbone.windows is not None:
        return centres(boxes_in(network, map_SHW))
    return peaks_of_maps(whole_map(network.backbone, map_SHW), network.backbone.input_size)


def peaks_of_maps(map_SHW: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """Centre of the largest pixel of each map, upsampled (bicubic) to a picture of that size; the first of equals."""
    height, width = size_hw
    place_S = torch.cat([upsample(chunk, size_hw).flatten(1).argmax(1) for chunk in chunks(map_SHW.float(), size_hw)])
    return torch.stack([(place_S % width + 0.5) / width, (place_S // width + 0.5) / height], 1)


def boxes_in(network: ProtoPNet, map_SHW: Tensor) -> Tensor:
    """Return the boxes that explanations show."""
    box_S4 = cell_boxes(network, map_SHW)
    return box_S4 / _sides(network.backbone.input_size, box_S4.device)


@lru_cache(maxsize=64)
def _sides(size_hw: tuple[int, int], device: torch.device) -> Tensor:
    """Return width and height twice; made anew, it would wait for all that the device is at."""
    height, width = size_hw
    return torch.tensor([width, height, width, height], device=device)


def centres(box: Tensor) -> Tensor:
    """Return the centres, ... x 2, of boxes, ... x 4."""
    return (box[..., :2] + box[..., 2:]) / 2


def intersection_over_union(a_S4: Tensor, b_S4: Tensor) -> Tensor:
    """Return the overlap of boxes two by two; 0 where both are empty."""
    side_S2 = (torch.minimum(a_S4[:, 2:], b_S4[:, 2:]) - torch.maximum(a_S4[:, :2], b_S4[:, :2])).clamp(min=0)
    both_S = side_S2.prod(1)
    return both_S / (areas(a_S4) + areas(b_S4) - both_S).clamp(min=1e-12)


def areas(box_S4: Tensor) -> Tensor:
    return (box_S4[:, 2:] - box_S4[:, :2]).clamp(min=0).prod(1)


def distance_to_box(point_S2: Tensor, box_S4: Tensor) -> Tensor:
    """Return the Euclidean distance in shares; 0 inside, NaN where there is no box."""
    outside_S2 = torch.maximum(box_S4[:, :2] - point_S2, point_S2 - box_S4[:, 2:]).clamp(min=0)
    return outside_S2.square().sum(1).sqrt()


def box_masks(box_BE4: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """Return a mask, B, E, height, width, that is true at pixels whose centre lies in the box."""
    height, width = size_hw
    x_W = (torch.arange(width, device=box_BE4.device) + 0.5) / width
    y_H = (torch.arange(height, device=box_BE4.device) + 0.5) / height
    x0, y0, x1, y1 = box_BE4[..., None].unbind(2)
    return ((y_H >= y0) & (y_H < y1))[..., :, None] & ((x_W >= x0) & (x_W < x1))[..., None, :]
