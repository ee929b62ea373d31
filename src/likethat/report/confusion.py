"""The confusion matrix as a picture: a click on a cell shows the pictures in it, where they are at hand with their
sheets."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from likethat.explaining.draw.page import write_page
from likethat.explaining.draw.pictures import Pictures
from likethat.explaining.scoring import ScoredPicture
from likethat.runs.judged import JudgedImage

SIDE, LARGEST, LEAST = 640, 40, 3  # of the whole picture and of a cell, at most and at least, in pixels
NAMED = 40  # classes whose names stand beside the picture, at most
COUNTED = 25  # classes whose cells show numbers, at most
OF_A_CELL = 6  # sheets, at most


@dataclass(frozen=True)
class ConfusionCell:
    """Pictures of one class that were taken for one class."""

    row: int  # the true class
    column: int  # the predicted class
    images: tuple[JudgedImage, ...]
    share: float  # of the pictures of the true class

    @property
    def id(self) -> str:
        return f"cell-{self.row}-{self.column}"

    @property
    def is_wrong(self) -> bool:
        return self.row != self.column


@dataclass(frozen=True)
class ConfusionMatrix:
    classes: tuple[str, ...]
    cells: tuple[ConfusionCell, ...]  # that are not empty: wrong ones first, most frequent first

    @property
    def side(self) -> float:
        """Return the pixels of a cell."""
        return min(LARGEST, max(LEAST, SIDE / len(self.classes)))

    @property
    def is_named(self) -> bool:
        return len(self.classes) <= NAMED

    @property
    def is_counted(self) -> bool:
        return len(self.classes) <= COUNTED


def confusion_matrix(judged: Sequence[JudgedImage], classes: Sequence[str]) -> ConfusionMatrix:
    """Sort pictures by what they are and what they are taken for; those that nobody asked the model about are left
    out."""
    number_of = {name: number for number, name in enumerate(classes)}
    found: dict[tuple[int, int], list[JudgedImage]] = {}
    total = [0] * len(classes)
    for image in judged:
        if image.predicted is not None:
            row, column = number_of[image.class_name], number_of[image.predicted]
            found.setdefault((row, column), []).append(image)
            total[row] += 1
    cells = [
        ConfusionCell(row, column, tuple(images), len(images) / total[row]) for (row, column), images in found.items()
    ]
    cells.sort(key=lambda cell: (not cell.is_wrong, -len(cell.images), cell.row, cell.column))
    return ConfusionMatrix(tuple(classes), tuple(cells))


def to_explain(matrix: ConfusionMatrix, most: int) -> list[JudgedImage]:
    """Return the pictures whose sheets a page shows: one of every cell, then another, while there is room; wrong ones
    before right ones."""
    chosen: list[JudgedImage] = []
    for wrong in (True, False):
        cells = [cell for cell in matrix.cells if cell.is_wrong == wrong]
        chosen += [cell.images[n] for n in range(OF_A_CELL) for cell in cells if n < len(cell.images)]
    return chosen[:most]


def draw_matrix(matrix: ConfusionMatrix, page: str | None) -> str:
    """Return the matrix as an SVG. A click on a cell goes to its place on `page`, "" for the page that the SVG stands
    on. There are no links where it is None."""
    side, margin = matrix.side, 170 if matrix.is_named else 30
    field = side * len(matrix.classes)
    whole, names = f"{margin + field + 8:g}", [html.escape(name) for name in matrix.classes]
    parts = [
        f'<svg class="matrix" viewBox="0 0 {whole} {whole}" width="{whole}" role="img" '
        f'aria-label="Confusion matrix of {len(names)} classes">',
        f'<rect x="{margin}" y="{margin}" width="{field:g}" height="{field:g}" class="ground"/>',
        f'<text x="{margin}" y="14">taken for →</text><text x="4" y="{margin - 8}">is ↓</text>',
    ]
    for number, name in enumerate(matrix.classes if matrix.is_named else ()):
        middle, edge = margin + (number + 0.5) * side + 4, margin - 6
        parts.append(f'<text x="{edge}" y="{middle:g}" text-anchor="end">{html.escape(name[-24:])}</text>')
        parts.append(f'<text transform="translate({middle:g} {edge}) rotate(-90)">{html.escape(name[-22:])}</text>')
    for cell in matrix.cells:
        x, y = margin + cell.column * side, margin + cell.row * side
        title = f"{len(cell.images)} pictures of {names[cell.row]} ({100 * cell.share:.1f} %)"
        drawn = (
            f'<rect class="{"wrong" if cell.is_wrong else "right"}" x="{x:g}" y="{y:g}" width="{side:g}" '
            f'height="{side:g}" fill-opacity="{0.15 + 0.85 * cell.share:.3f}">'
            f"<title>{title} taken for {names[cell.column]}</title></rect>"
        )
        if matrix.is_counted:
            place = f'x="{x + side / 2:g}" y="{y + side / 2 + 4:g}"'
            drawn += f'<text class="count" {place} text-anchor="middle">{len(cell.images)}</text>'
        parts.append(drawn if page is None else f'<a href="{html.escape(page)}#{cell.id}">{drawn}</a>')
    return "\n".join(['<div class="scroll">', *parts, "</svg>", "</div>"])


def write_confusions(
    path: Path, title: str, matrix: ConfusionMatrix, explanations: Mapping[str, ScoredPicture], **facts: Any
) -> Path:
    """Write a page with the matrix and, by path, the sheets of pictures in its cells."""
    return write_page(
        path,
        "confusions.html",
        ["likethat.report"],
        title=title,
        matrix=matrix,
        matrix_picture=draw_matrix(matrix, ""),
        explanations=explanations,
        pictures=Pictures(True),
        **facts,
    )
