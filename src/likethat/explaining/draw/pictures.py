"""Pictures of a page: each is stored once, inside the page or beside it, and drawn as often as needed."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from likethat.data.decode import Box
from likethat.data.reading.workers import map_in_threads
from likethat.explaining.draw.heat import heat_layer
from likethat.explaining.draw.render import encode, jpeg, read_jpeg, scaled, shrink
from likethat.explaining.matches import Match
from likethat.explaining.scoring import ScoredPicture

QUERY_SIDE = 320  # pixels of the explained picture
MOST_ROWS = 10  # of a scoring sheet; the others are summed in one line
HEAT_SIDE = 56  # of a heat map, which is smooth and so small; the browser enlarges it


@dataclass(frozen=True)
class Picture:
    id: str
    href: str
    width: int
    height: int


@dataclass(frozen=True)
class Drawing:
    """A picture with what lies on it; the box is in pixels of the picture."""

    picture: Picture
    label: str
    box: Box | None = None
    heat: str | None = None
    alone: bool = False  # nothing but what is in the box


def data_uri(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


class Pictures:
    """All pictures of one page. With `inline` the page holds them; without, it names files in its own folder."""

    def __init__(self, inline: bool, colours: str = "ember") -> None:
        self.inline, self.colours = inline, colours
        self.by_key: dict[object, Picture] = {}
        self.heats: dict[int, tuple[Match, str]] = {}  # by the id of the match, which must not be another's meanwhile

    def of_file(self, run: Path, name: str) -> Picture:
        key = (run, name)
        if key not in self.by_key:
            data, size = read_jpeg(run, name)
            href = data_uri(data, "jpeg") if self.inline else name
            self.by_key[key] = Picture(f"p{len(self.by_key)}", href, *size)
        return self.by_key[key]

    def of_explanation(self, explanation: ScoredPicture) -> Picture:
        key = id(explanation)
        if key not in self.by_key:
            image = shrink(explanation.picture, QUERY_SIDE)
            self.by_key[key] = Picture(f"p{len(self.by_key)}", data_uri(jpeg(image), "jpeg"), *image.size)
        return self.by_key[key]

    def crop(self, explanation: ScoredPicture, match: Match) -> Drawing:
        title = match.prototype.title
        if match.source_share is None:
            return Drawing(self.of_file(explanation.run, match.prototype.crop), title)
        return replace(self.source(explanation, match), label=title, alone=True)

    def source(self, explanation: ScoredPicture, match: Match) -> Drawing:
        prototype, label = match.prototype, f"training picture of {match.prototype.class_name}"
        picture, box = self.of_file(explanation.run, prototype.source), prototype.source_box
        if match.source_share is not None:
            box = scaled(match.source_share, picture.width, picture.height)
        return Drawing(picture, label, box)

    def whole(self, explanation: ScoredPicture) -> Drawing:
        return Drawing(self.of_explanation(explanation), "your picture")

    def part(self, explanation: ScoredPicture, match: Match) -> Drawing:
        picture = self.of_explanation(explanation)
        return Drawing(picture, "your picture", scaled(match.share, picture.width, picture.height))

    def part_alone(self, explanation: ScoredPicture, match: Match) -> Drawing:
        """Return the part by itself: the browser cuts it out of the picture, which the page holds once."""
        return replace(self.part(explanation, match), label="this part of your picture", alone=True)

    def activation(self, explanation: ScoredPicture, match: Match) -> Drawing:
        drawing, key = self.part(explanation, match), id(match)  # of several sheets of one picture
        if key not in self.heats:
            self.heats[key] = match, _heat(match.map_HW, drawing.picture, self.colours)
        return replace(drawing, label="activation map", box=None, heat=self.heats[key][1])

    def draw_heats(self, explanation: ScoredPicture) -> None:
        """Draw ahead, by threads, the heat maps that a page shows: most of its time goes into them."""
        picture, shown = self.of_explanation(explanation), {id(match): match for match in _shown_matches(explanation)}
        heats = map_in_threads(lambda match: _heat(match.map_HW, picture, self.colours), shown.values())
        self.heats |= {key: (match, heat) for (key, match), heat in zip(shown.items(), heats, strict=True)}


def _shown_matches(explanation: ScoredPicture) -> Iterator[Match]:
    """Yield what the scoring sheets of a page show of a picture; several may show the same."""
    for sheet in explanation.sheets:
        for group in sheet.main_groups(MOST_ROWS)[0]:
            yield from (row.match for row in group.rows)


def _heat(map_HW: Tensor, picture: Picture, colours: str) -> str:
    scale = HEAT_SIDE / max(picture.width, picture.height)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    # Method 2 is three times as fast as Pillow's own choice, and its files are a fifth larger.
    return data_uri(encode(heat_layer(map_HW, size, colours), "WEBP", quality=85, method=2), "webp")
