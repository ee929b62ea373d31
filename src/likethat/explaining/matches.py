"""Prototypes and the parts of a picture that look most like them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from likethat.data.decode import Box
from likethat.data.loaders import to_unit
from likethat.explaining.attribution import UPSAMPLING, attribute
from likethat.explaining.boxes import match_boxes, whole_map
from likethat.explaining.draw.render import in_shares
from likethat.explaining.sources import source_shares
from likethat.models.protopnet import Output
from likethat.runs.classifier import Classifier, PreparedPicture, Prototype


@dataclass(frozen=True, eq=False)
class Match:
    """A prototype and the part of the picture that looks most like it."""

    prototype: Prototype
    similarity: float
    box: Box  # in pixels of the image file, as a prototype's own box
    share: Box  # the same box as shares of the picture that the network saw
    map_HW: Tensor  # similarity of every patch, or of the best window over each place; or what each place adds to it
    attribution: str = UPSAMPLING  # how the map was made
    source_share: Box | None = None  # what it finds in the training picture, in shares of that; None: the run's own box

    def to_dict(self) -> dict[str, Any]:
        source = {"path": self.prototype.path, "class": self.prototype.class_name, "box": list(self.prototype.box)}
        if self.source_share is not None:
            source["share"] = list(self.source_share)
        return {
            "prototype": self.prototype.id,
            "name": self.prototype.name,
            "similarity": self.similarity,
            "box": list(self.box),
            "attribution": self.attribution,
            "source": source,
        }


def find_matches(
    classifier: Classifier,
    outputs: Sequence[Output],
    prepared: PreparedPicture,
    number: int,
    score_P: Tensor,
    wanted_P: Tensor,
    closely_P: Tensor,
    *,
    percentile: float,
    attribution: str,
    patience: float | None = None,
) -> dict[int, Match]:
    """Find the wanted prototypes in one picture of the batch, by their place among all members' prototypes.

    `score_P` are their similarities. Those of `closely_P` are located by `attribution`, the others by upsampling,
    which costs nothing; so are they in their own training pictures, for which there are `patience` seconds.
    """
    found: dict[int, Match] = {}
    finely_P = wanted_P & closely_P if attribution != UPSAMPLING else torch.zeros_like(wanted_P)
    first_things_first = sorted(finely_P.nonzero()[:, 0].tolist(), key=lambda p: -float(score_P[p]))
    shares = source_shares(classifier, first_things_first, attribution, percentile, patience)
    start = 0
    for network, output, pixels, view in zip(
        classifier.networks, outputs, prepared.pixels, prepared.views, strict=True
    ):
        mine = slice(start, start + output.score_BP.shape[1])
        for method, chosen_P in ((UPSAMPLING, wanted_P & ~finely_P), (attribution, finely_P)):
            numbers = chosen_P[mine].nonzero()[:, 0]
            if not len(numbers):
                continue
            chosen_p = numbers.to(classifier.device)
            similarity_pHW = output.of_distance(output.distance_BPHW[number, chosen_p])
            if method == UPSAMPLING:
                map_pHW = whole_map(network.backbone, similarity_pHW)
                boxes = match_boxes(network, similarity_pHW, percentile)
            else:
                map_pHW = attribute(network, to_unit(pixels.to(classifier.device)), chosen_p, method)
                boxes = match_boxes(network, similarity_pHW, percentile, map_pHW)
            similarities, (height, width) = score_P[mine][numbers].tolist(), view.input_hw
            for p, similarity, box, map_HW in zip(numbers.tolist(), similarities, boxes, map_pHW.cpu(), strict=True):
                prototype, share = classifier.prototypes[start + p], in_shares(box, width, height)
                places = (view.to_file(box), share, map_HW, method, shares.get(start + p))
                found[start + p] = Match(prototype, similarity, *places)
        start = mine.stop
    assert start == len(classifier.prototypes), "prototypes.json and the model disagree on the number of prototypes"
    return found
