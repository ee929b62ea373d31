"""What `likethat calibrate` does."""

from __future__ import annotations

from dataclasses import replace

import torch

from likethat.errors import UserError
from likethat.metrics.accuracy import logits_of
from likethat.progress import Display
from likethat.runs import layout
from likethat.runs.calibration import Calibration, fit_calibration, write_calibration
from likethat.runs.classifier import Classifier
from likethat.runs.data import is_training_data, open_validation_data
from likethat.runs.lock import lock_run
from likethat.runs.manifest import update_manifest


def calibrate_run(classifier: Classifier, data: str | None, display: Display) -> Calibration:
    """Write calibration.json, new or again, from images that the run was not trained on."""
    dataset = open_validation_data(classifier, data)
    if not dataset.val:
        raise UserError(f"{dataset.root} has no validation images; name others with --data DATA.")
    label_N = torch.tensor([sample.label for sample in dataset.val])
    logits_NK = logits_of(classifier, dataset.root, dataset.val, display)
    others = data is not None and not is_training_data(classifier, dataset)
    calibration = replace(fit_calibration(logits_NK, label_N), other_images=others)
    with lock_run(classifier.path):
        write_calibration(classifier.path, calibration)
        update_manifest(classifier.path, layout.CALIBRATION)
    return calibration
