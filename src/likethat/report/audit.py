"""The page and the table of an audit: pictures whose label the evidence contradicts."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from likethat.data.folder_kinds import AUDIT
from likethat.explaining.draw.page import write_page
from likethat.explaining.draw.pictures import Pictures
from likethat.explaining.scoring import ScoredPicture
from likethat.runs.atomic_files import write_text

PAGE, TABLE = AUDIT
HEADINGS = ("rank", "part", "image", "class", "looks_like", "probability_of_class", "probability_of_looks_like")


class Doubted(Protocol):
    """What is told of a picture."""

    @property
    def part(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def class_name(self) -> str: ...
    @property
    def suggested(self) -> str: ...
    @property
    def label_probability(self) -> float: ...
    @property
    def suggested_probability(self) -> float: ...


def write_audit(
    folder: Path, name: str, doubts: Sequence[Doubted], explanations: Sequence[ScoredPicture], notes: Sequence[str]
) -> None:
    """Write the table of all pictures, and a page of the first ones with their sheets."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(HEADINGS)
    for rank, doubt in enumerate(doubts, start=1):
        shares = f"{doubt.label_probability:.6f}", f"{doubt.suggested_probability:.6f}"
        lines.writerow((rank, doubt.part, doubt.path, doubt.class_name, doubt.suggested, *shares))
    write_text(folder / TABLE, text.getvalue())
    write_page(
        folder / PAGE,
        "audit.html",
        ["likethat.report"],
        name=name,
        doubts=doubts,
        explanations=explanations,
        notes=notes,
        table=TABLE,
        pictures=Pictures(True),
    )
