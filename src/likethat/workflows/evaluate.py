"""What `likethat evaluate` does."""

from __future__ import annotations

import torch

from likethat.metrics.accuracy import Evaluation, evaluate_logits, logits_of
from likethat.progress import Display
from likethat.runs.baseline import LoadedBaseline
from likethat.runs.classifier import Classifier
from likethat.runs.data import open_test_data
from likethat.runs.judged import JudgedImage, judge


def evaluate_run(
    classifier: Classifier | LoadedBaseline, data: str | None, display: Display
) -> tuple[Evaluation, list[JudgedImage]]:
    """Return how often the model is right, and what it takes each image for."""
    dataset, part = open_test_data(classifier, data)
    logits_NK = logits_of(classifier, dataset.root, dataset.test, display)
    label_N = torch.tensor([sample.label for sample in dataset.test], device=logits_NK.device)
    judged = judge(part, dataset.test, classifier.classes, logits_NK)
    return evaluate_logits(logits_NK, label_N, classifier.classes, part), judged
