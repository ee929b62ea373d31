"""What `likethat evaluate` does."""

from __future__ import annotations

import torch

from likethat.metrics.accuracy import Evaluation, evaluate_logits, logits_of
from likethat.progress import Display
from likethat.runs.baseline import LoadedBaseline
from likethat.runs.classifier import Classifier
from likethat.runs.data import open_test_data


def evaluate_run(classifier: Classifier | LoadedBaseline, data: str | None, display: Display) -> Evaluation:
    dataset, part = open_test_data(classifier, data)
    logits_NK = logits_of(classifier, dataset.root, dataset.test, display)
    label_N = torch.tensor([sample.label for sample in dataset.test], device=logits_NK.device)
    return evaluate_logits(logits_NK, label_N, classifier.classes, part)
