"""Pictures read ahead of the networks, by threads or by other processes.

What the networks see lies in memory that all of them share: a few batches, used in turn.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from likethat.data.decode import Box, ImageError, View, read_image, to_input
from likethat.data.reading.values import Range
from likethat.data.reading.workers import UNDER_WAY, map_many, shared_array
from likethat.runs.classifier import Classifier
from likethat.runtime import usable_processors

MemberViews = tuple[View, ...]  # of a picture, one a member


@dataclass(frozen=True, slots=True)
class NamedPicture:
    """A picture that is asked about, and the box that it is cropped to first."""

    path: str
    box: Box | None = None


@dataclass(frozen=True)
class ReadBatch:
    """Pictures as the networks see them; the pictures themselves, which may be large, are not kept."""

    pictures: Sequence[NamedPicture]
    told: Sequence[MemberViews | str]  # of each picture: its views, or what is wrong with it where it could not be read
    pixels: tuple[np.ndarray, ...]  # BHW3 uint8 of those that could be read, one a member; the next batch's, soon

    @property
    def views(self) -> list[MemberViews]:
        return [told for told in self.told if not isinstance(told, str)]


def read_batches(
    classifier: Classifier, pictures: Sequence[NamedPicture], own: Sequence[int], batch: int
) -> Generator[ReadBatch]:
    """Yield those batches of `batch` pictures that have the numbers `own`. The pixels of one are good until the next is
    asked for."""
    workers = max(1, usable_processors() - 1)  # somebody feeds the networks
    sizes = [(batch, *network.backbone.input_size, 3) for network in classifier.networks]
    slots = tuple(tuple(map(shared_array, sizes)) for _ in range(2 + workers * UNDER_WAY // batch))
    asked = [range(number * batch, min((number + 1) * batch, len(pictures))) for number in own]
    value_range = classifier.value_range

    def read(place: tuple[int, int, int]) -> MemberViews | str:
        slot, row, number = place
        return _read(pictures[number], value_range, [seen_BHW3[row] for seen_BHW3 in slots[slot]])

    places = ((turn % len(slots), row, number) for turn, part in enumerate(asked) for row, number in enumerate(part))
    with closing(map_many(read, places, sum(map(len, asked)), workers)) as found:
        for turn, part in enumerate(asked):
            told = list(islice(found, len(part)))
            good = [row for row, one in enumerate(told) if not isinstance(one, str)]
            kept = slice(len(told)) if len(good) == len(told) else good
            pixels = tuple(seen_BHW3[kept] for seen_BHW3 in slots[turn % len(slots)])
            yield ReadBatch(pictures[part.start : part.stop], told, pixels)


def _read(picture: NamedPicture, value_range: Range | None, seen: Sequence[np.ndarray]) -> MemberViews | str:
    """Fill in what each network sees; return the views, or what is wrong with the picture."""
    try:
        upright = read_image(Path(picture.path), value_range=value_range)
    except ImageError as error:
        return error.cause
    views = []
    for seen_HW3 in seen:
        seen_HW3[:], view = to_input(upright, picture.box, seen_HW3.shape[:2])
        views.append(view)
    return tuple(views)
