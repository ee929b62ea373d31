"""What `likethat calibrate` does."""

from __future__ import annotations

import torch

from likethat.errors import UserError
from likethat.metrics.accuracy import logits_of
from likethat.progress import Display
from likethat.runs.calibration import Calibration, fit_calibration, write_calibration
from likethat.runs.classifier import Classifier
from likethat.runs.data import open_validation_data


def calibrate_run(classifier: Classifier, data: str | None, display: Display) -> Calibration:
    """Write calibration.json, new or again, from images that the run was not trained on."""
    dataset = open_validation_data(classifier, data)
    if not dataset.val:
        raise UserError(f"{dataset.root} has no validation images; name others with --data DATA.")
    label_N = torch.tensor([sample.label for sample in dataset.val])
    calibration = fit_calibration(logits_of(classifier, dataset.root, dataset.val, display), label_N)
    write_calibration(classifier.path, calibration)
    return calibration
