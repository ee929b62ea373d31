"""Which images a run held out, and which of them it got wrong: a table for people, in a run folder or on request."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from likethat.data.dataset import Sample
from likethat.runs.atomic_files import write_text

HEADINGS = ("part", "image", "class", "predicted", "probability", "right")


@dataclass(frozen=True)
class JudgedImage:
    """An image and the class that the model gave it; None for one that it was not asked about, as it learned it."""

    part: str
    path: str
    class_name: str
    predicted: str | None = None
    probability: float | None = None  # of the predicted class

    @property
    def is_wrong(self) -> bool:
        return self.predicted is not None and self.predicted != self.class_name


def judge(part: str, samples: Sequence[Sample], classes: Sequence[str], logits_NK: Tensor | None) -> list[JudgedImage]:
    """Return the images in their order; without logits, without predictions."""
    if logits_NK is None:
        return [JudgedImage(part, sample.path, classes[sample.label]) for sample in samples]
    probability_N, guess_N = logits_NK.cpu().double().softmax(1).max(1)
    return [
        JudgedImage(part, sample.path, classes[sample.label], classes[guess], probability)
        for sample, guess, probability in zip(samples, guess_N.tolist(), probability_N.tolist(), strict=True)
    ]


def write_judged(path: Path, images: Iterable[JudgedImage]) -> None:
    """Write the table as CSV."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(HEADINGS)
    for image in images:
        answer: tuple[str, ...] = ("", "", "")
        if image.predicted is not None:
            answer = (image.predicted, f"{image.probability:.4f}", "no" if image.is_wrong else "yes")
        lines.writerow((image.part, image.path, image.class_name, *answer))
    write_text(path, text.getvalue())
