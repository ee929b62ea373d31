"""How often the model is right, overall and by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from likethat.data.dataset import Sample
from likethat.inference.passes import gather_logits, measure, own_batches_of_files
from likethat.metrics.unbalanced import BalancedFigures, balanced_figures
from likethat.progress import Display
from likethat.runs.baseline import LoadedBaseline
from likethat.runs.classifier import Classifier


@dataclass(frozen=True)
class Evaluation:
    part: str
    images: int
    accuracy: float
    top5_accuracy: float
    cross_entropy: float
    classes: int
    by_class: dict[str, float]
    confusions: tuple[tuple[str, str, int], ...]  # true class, predicted class, how often; most frequent first
    balanced: BalancedFigures | None = None  # figures that count every class alike; None without any image

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def logits_of(
    classifier: Classifier | LoadedBaseline, root: Path, samples: Sequence[Sample], display: Display
) -> Tensor:
    """Return logits of image files, summed over the members, each at its own input size."""
    total_NK = torch.zeros(len(samples), len(classifier.classes), device=classifier.device)
    device = classifier.device
    for model in classifier.networks if isinstance(classifier, Classifier) else [classifier.model]:
        with display.task("evaluating") as advance:
            batches = own_batches_of_files(root, samples, model.backbone.input_size, device, advance)
            total_NK += gather_logits(model, batches, len(samples), device)
    return total_NK


def evaluate_logits(logits_NK: Tensor, label_N: Tensor, classes: Sequence[str], part: str) -> Evaluation:
    guess_N = logits_NK.argmax(1)
    right_N = guess_N == label_N
    top = min(5, len(classes))
    in_top_N = (logits_NK.topk(top, dim=1).indices == label_N[:, None]).any(1)
    count_K = label_N.bincount(minlength=len(classes))
    right_K = label_N[right_N].bincount(minlength=len(classes))
    pair_N = (label_N * len(classes) + guess_N)[~right_N]
    pairs, counts = pair_N.unique(return_counts=True)
    order = counts.argsort(descending=True, stable=True)[:10]
    confusions = tuple(
        (classes[pair // len(classes)], classes[pair % len(classes)], count)
        for pair, count in zip(pairs[order].tolist(), counts[order].tolist(), strict=True)
    )
    measured = measure(logits_NK, label_N)
    return Evaluation(
        part,
        len(label_N),
        measured["accuracy"],
        float(in_top_N.cpu().double().mean()),
        measured["cross_entropy"],
        len(classes),
        {name: int(right_K[k]) / int(count_K[k]) for k, name in enumerate(classes) if count_K[k]},
        confusions,
        balanced_figures(logits_NK, label_N, classes) if len(label_N) else None,
    )
