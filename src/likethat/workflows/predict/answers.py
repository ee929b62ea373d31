"""What is answered about each of many pictures: class, probability, prediction set and the strongest reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from likethat.data.decode import Box
from likethat.data.loaders import to_unit
from likethat.errors import UserError
from likethat.metrics.regions import Reading
from likethat.runs.classifier import Classifier
from likethat.runtime import fetch, send
from likethat.workflows.predict.formats import REASONS, Row
from likethat.workflows.predict.reading import MemberViews, ReadBatch


@dataclass(frozen=True)
class Found:
    """What the networks found in a batch."""

    logits_BK: Tensor
    score_BP: Tensor
    prototype_BR: Tensor  # that give the predicted class most points, most first
    points_BR: Tensor
    box_BR4: Tensor  # where they are found, in shares of what the network sees


@torch.no_grad()
def find_answers(classifier: Classifier, pixels: Sequence[np.ndarray]) -> Callable[[], Found]:
    """Let the networks look at a batch, and locate the reasons of what they predict; nothing waits for the device until
    the function that is returned is called. Boxes of other prototypes, which would take longer than the networks do,
    are not worked out."""
    networks, outputs = classifier.networks, []
    for network, pixel_BHW3 in zip(networks, pixels, strict=True):
        outputs.append(network(to_unit(send(torch.from_numpy(pixel_BHW3), classifier.device).permute(0, 3, 1, 2))))
    reading = Reading(networks, outputs)
    points_BP = reading.score_BP * classifier.weight_KP[reading.logits_BK.argmax(1)]
    points_BR, prototype_BR = points_BP.topk(min(REASONS, points_BP.shape[1]), dim=1)
    image_BR = torch.arange(len(points_BR), device=classifier.device)[:, None].expand_as(prototype_BR)
    box_S4 = reading.boxes(image_BR.flatten(), prototype_BR.flatten())
    box_BR4 = box_S4.unflatten(0, prototype_BR.shape)
    arrived = fetch(reading.logits_BK, reading.score_BP, prototype_BR, points_BR, box_BR4)
    return lambda: Found(*arrived())


def rows_of(classifier: Classifier, batch: ReadBatch, found: Found | None, level: float | None) -> list[Row]:
    """Return one row a picture, in their order; `found` is about those that could be read, if there are any."""
    answered = iter(_answers(classifier, batch.views, found, level))
    return [
        {"path": picture.path, **(_unread(told) if isinstance(told, str) else next(answered))}
        for picture, told in zip(batch.pictures, batch.told, strict=True)
    ]


def _answers(
    classifier: Classifier, views_B: Sequence[MemberViews], found: Found | None, level: float | None
) -> list[Row]:
    if found is None:
        return []
    logits_BK, score_BP = found.logits_BK.double(), found.score_BP.double()
    if not bool(logits_BK.isfinite().all()):
        raise UserError(f"{classifier.path} gives points that are no numbers, so its weights are damaged; restore it.")
    verdicts = classifier.verdicts(logits_BK, score_BP, level)
    probability_B, guess_B = logits_BK.softmax(1).max(1)
    similarity_BR = score_BP.gather(1, found.prototype_BR)
    columns = (probability_B, guess_B, found.prototype_BR, found.points_BR, similarity_BR, found.box_BR4)
    rows = []
    for views, verdict, probability, guess, *reasons in zip(
        views_B, verdicts, *(column.tolist() for column in columns), strict=True
    ):
        rows.append(
            {
                "class": classifier.classes[guess],
                "probability": round(probability, 6),
                "prediction_set": None if verdict is None else list(verdict.classes),
                "level": None if verdict is None else verdict.level,
                "abstains": None if verdict is None else verdict.abstains,
                "error": None,
                "reasons": [
                    _reason(classifier, views, *reason) for reason in zip(*reasons, strict=True) if reason[1] > 0
                ],
            }
        )
    return rows


def _unread(cause: str) -> Row:
    nothing = dict.fromkeys(("class", "probability", "prediction_set", "level", "abstains"))
    return {**nothing, "error": cause, "reasons": []}


def _reason(
    classifier: Classifier, views: MemberViews, number: int, points: float, similarity: float, share: Box
) -> dict[str, Any]:
    """Return a prototype that speaks for the class, and where it is found in the file's pixels."""
    prototype = classifier.prototypes[number]
    view = views[prototype.member]
    height, width = view.input_hw
    box = view.to_file((share[0] * width, share[1] * height, share[2] * width, share[3] * height))
    return {
        "prototype": prototype.id,
        "name": prototype.name,
        "class": prototype.class_name,
        "points": round(points, 4),
        "similarity": round(similarity, 4),
        "source": prototype.path,
        "box": [round(value, 1) for value in box],
    }
