"""What `likethat verify` does."""

from __future__ import annotations

from likethat.explaining.verify import Verification, verify
from likethat.progress import Display
from likethat.runs.classifier import Classifier
from likethat.runs.data import data_roots


def verify_run(classifier: Classifier, data: str | None, display: Display) -> Verification:
    with display.task("verifying") as advance:
        return verify(classifier, data_roots(classifier, data), advance)
