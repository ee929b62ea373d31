"""What a model may promise about a new picture, judged by how it did on images it was not trained on."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from likethat.errors import UserError
from likethat.runs import layout
from likethat.runs.atomic_files import write_json
from likethat.runs.schema import damaged, read_document

LEVEL = 0.95
LEVELS = (0.8, 0.9, LEVEL)  # one of them is the level where none is asked for
ROUNDING = 1e-9  # in units of images: 20 x 0.95 are 19 of them, and not a bit more
BLOCK = 1024  # images looked at in float64 at a time
MOST_NAMES = 4  # of a prediction set, in a sentence


@dataclass(frozen=True)
class Verdict:
    """What is promised about one picture; or that nothing is."""

    level: float
    classes: tuple[str, ...]  # the prediction set, likeliest first: it holds the true class with this probability
    informed: bool  # False where the validation images are too few for this level, so that the set holds everything
    likeness: float  # how much the picture looks like anything known: the most points that a class gets
    unlike: bool  # less than nearly all validation images
    nearest: int  # the prototype that a part of the picture looks most like
    nearest_title: str  # what a page calls it
    nearest_class: str
    similarity: float  # of the two
    remedy: str = ""  # what would allow a higher level, where there are too few validation images for it

    @property
    def abstains(self) -> bool:
        return self.unlike or not self.classes

    def to_dict(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "prediction_set": list(self.classes),
            "informed": self.informed,
            "likeness": self.likeness,
            "unlike": self.unlike,
            "abstains": self.abstains,
            "nearest": {"prototype": self.nearest, "class": self.nearest_class, "similarity": self.similarity},
            **({"remedy": self.remedy} if self.remedy else {}),
        }

    def sentence(self) -> str:
        return f"{self._promise()}. {self.remedy}" if self.remedy else self._promise()

    def _promise(self) -> str:
        nearest = f"the model abstains. Nearest is {self.nearest_title} of {self.nearest_class}"
        if self.unlike:
            return f"Unlike everything known: {nearest}"
        promised = f"at {100 * self.level:g} %"
        if not self.classes:
            return f"No class is likely enough {promised}: {nearest}"
        if not self.informed:
            return f"Too few validation images to exclude any class {promised}"
        if len(self.classes) == 1:
            return f"Only {self.classes[0]} remains plausible {promised}"
        more = len(self.classes) - MOST_NAMES
        names = ", ".join(self.classes[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        return f"One of these {len(self.classes)} {promised}: {names}"


@dataclass(frozen=True)
class Calibration:
    """Of every validation image, in ascending order, how badly its class fitted and how familiar it looked."""

    nonconformity: tuple[float, ...]  # 1 - probability of the true class
    likeness: tuple[float, ...]  # the most points that a class got
    other_images: bool = False  # than the run's own validation images, named by a user

    @property
    def usual_level(self) -> float:
        """Return the largest of the usual levels at which the validation images can exclude a class; or the least."""
        return max(filter(self.informs, LEVELS), default=LEVELS[0])

    def remedy(self, level: float | None) -> str:
        """Return how to be promised the level that was asked for, or the highest usual one; nothing if it is."""
        wanted = LEVEL if level is None else level
        if self.informs(wanted):
            return ""
        needed = math.ceil(wanted / (1 - wanted) - ROUNDING)
        return (
            f"{100 * wanted:g} % takes {needed} validation images, and there are {len(self.nonconformity)}: "
            "`likethat calibrate RUN --data DATA` takes more"
        )

    def informs(self, level: float) -> bool:
        """Return whether there are enough validation images to exclude any class at this level."""
        return math.isfinite(conformal_threshold(self.nonconformity, level))

    def likeliest_classes(
        self, probability_NK: Tensor, level: float = LEVEL, least_N: Tensor | None = None
    ) -> list[list[int]]:
        """Return each picture's classes, likeliest first, that fit no worse than the true classes of validation images
        did; of float64 probabilities, and with `least_N` no fewer than that.

        Split-conformal: of pictures that come as the validation images came, at least the share `level` has its
        true class in the set. An empty set says that no class fits.
        """
        size_N = self.prediction_sets(probability_NK, level).sum(1)
        size_N = size_N if least_N is None else size_N.maximum(least_N)
        most = int(size_N.max()) if len(size_N) else 0
        order_Nk = probability_NK.argsort(dim=1, descending=True, stable=True)[:, :most]
        return [order_k[:size] for order_k, size in zip(order_Nk.tolist(), size_N.tolist(), strict=True)]

    def prediction_sets(self, probability_NK: Tensor, level: float = LEVEL) -> Tensor:
        """Return, for float64 probabilities, whether each class is in each picture's prediction set: N x K."""
        return 1 - probability_NK <= conformal_threshold(self.nonconformity, level)

    def is_unlike(self, likeness: float, level: float = LEVEL) -> bool:
        """Return whether the picture looks less like anything known than nearly all validation images; of pictures
        that come as they came, at most the share 1 - `level` does."""
        check_level(level)
        as_little = bisect_right(self.likeness, likeness)
        return as_little + 1 <= (len(self.likeness) + 1) * (1 - level) + ROUNDING

    def to_dict(self) -> dict[str, Any]:
        return {
            "images": len(self.nonconformity),
            "nonconformity": list(self.nonconformity),
            "likeness": list(self.likeness),
            **({"other_images": True} if self.other_images else {}),
        }


def conformal_threshold(nonconformity: Sequence[float], level: float) -> float:
    """Return the ceil((n + 1) level)-th smallest of n values; infinite where there are not so many.

    The + 1 counts the new picture: a plain quantile would promise more than few images can keep.
    """
    check_level(level)
    rank = math.ceil((len(nonconformity) + 1) * level - ROUNDING)
    return sorted(nonconformity)[rank - 1] if rank <= len(nonconformity) else math.inf


def check_level(level: float) -> None:
    if not 0 < level < 1:
        raise UserError(f"A level must lie between 0 and 1, and {level:g} does not; 0.95 is the usual one.")


def likeness_of(logits_NK: Tensor) -> Tensor:
    """Return how much each picture looks like anything known: the points of the class that gets most."""
    return logits_NK.amax(1)


def fit_calibration(logits_NK: Tensor, label_N: Tensor) -> Calibration:
    """Fit the calibration to images that the network was not trained on."""
    nonconformity: list[float] = []
    likeness: list[float] = []
    for logits_bK, label_b in zip(logits_NK.detach().split(BLOCK), label_N.split(BLOCK), strict=True):
        logits_bK = logits_bK.cpu().double()
        probability_b = logits_bK.softmax(1).gather(1, label_b.cpu()[:, None])[:, 0]
        nonconformity += (1 - probability_b).tolist()
        likeness += likeness_of(logits_bK).tolist()
    return Calibration(tuple(sorted(nonconformity)), tuple(sorted(likeness)))


def write_calibration(run: Path, calibration: Calibration) -> None:
    write_json(run / layout.CALIBRATION, calibration.to_dict())


def read_calibration(run: Path) -> Calibration | None:
    """Read the calibration; return None for a run that was made without."""
    path = run / layout.CALIBRATION
    if not path.is_file():
        return None
    remedy = f"make it again with `likethat calibrate {run}`"
    document = read_document(path, {"nonconformity": tuple[float, ...], "likeness": tuple[float, ...]}, remedy)
    columns = [tuple(sorted(document[name])) for name in ("nonconformity", "likeness")]
    if not len(columns[0]) == len(columns[1]) > 0 or not -ROUNDING <= columns[0][0] <= columns[0][-1] <= 1 + ROUNDING:
        raise damaged(path, "it needs as many numbers of both kinds, nonconformities from 0 to 1", remedy)
    return Calibration(columns[0], columns[1], document.get("other_images") is True)
