"""How good a run's explanations are: what `likethat evaluate --interpretability` does."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from likethat.data.parts import read_parts
from likethat.metrics.accuracy import Evaluation, evaluate_logits, logits_of
from likethat.metrics.conformal import conformal_figures
from likethat.metrics.figure import MetricFigure
from likethat.metrics.out_of_distribution import out_of_distribution_figures
from likethat.metrics.registry import METRICS
from likethat.metrics.reliability import Bin, calibration_figures, reliability
from likethat.metrics.sweep import Subject, sweep
from likethat.progress import Display
from likethat.runs import layout
from likethat.runs.atomic_files import write_json
from likethat.runs.classifier import Classifier
from likethat.runs.data import is_training_data, open_held_out_data, open_out_of_distribution, open_test_data
from likethat.runs.lock import lock_run
from likethat.runs.manifest import update_manifest
from likethat.workflows.run_conclusion import report_images


@dataclass(frozen=True)
class Interpretability:
    """All figures, and what each prototype contributed to them (None where that is not known). `evaluation` names the
    part of the data that they were measured on."""

    evaluation: Evaluation
    data: str
    seconds: float
    figures: tuple[MetricFigure, ...]
    by_prototype: dict[str, list[float | None]]
    reliability: tuple[Bin, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "part": self.evaluation.part,
            "seconds": round(self.seconds, 1),
            "evaluation": self.evaluation.to_dict(),
            "figures": [figure.to_dict() for figure in self.figures],
            "by_prototype": self.by_prototype,
            "reliability": [asdict(found) for found in self.reliability],
        }


def evaluate_interpretability(
    classifier: Classifier, data: str | None, display: Display, ood: str | None = None, part: str = "test"
) -> Interpretability:
    """Measure a run on its test images, keep the result in the run folder and show it in the report; or measure it on
    other data, and then leave the run as it is. `ood` is a folder of pictures of other things.

    With the part "val", the validation images that the run held out are measured, and no test image is read.
    """
    started = time.monotonic()
    if part == "val":
        dataset, name = open_held_out_data(classifier, data), part
    else:
        dataset, name = open_test_data(classifier, data)
    samples = dataset.part(part)
    others = None if ood is None else open_out_of_distribution(classifier, ood)
    own = data is None or is_training_data(classifier, dataset)
    train = dataset.train if own else ()
    subject = Subject(classifier, dataset.root, samples, read_parts(dataset), name, train)
    metrics = [kind(subject) for kind in METRICS]
    logits_NK = sweep(subject, metrics, display)
    other_MK = None if others is None else logits_of(classifier, others.root, others.test, display)
    result = Interpretability(
        evaluate_logits(logits_NK, subject.label_N, classifier.classes, name),
        str(dataset.root),
        time.monotonic() - started,
        (
            *(figure for metric in metrics for figure in metric.figures()),
            *calibration_figures(logits_NK, subject.label_N),
            *conformal_figures(classifier.calibration, logits_NK, subject.label_N, fitted_here=part == "val"),
            *out_of_distribution_figures(classifier.calibration, logits_NK, other_MK, str(ood)),
        ),
        {name: _listed(value_P) for metric in metrics for name, value_P in metric.by_prototype().items()},
        tuple(reliability(logits_NK, subject.label_N)),
    )
    if own:
        with lock_run(classifier.path):
            write_json(classifier.path / layout.INTERPRETABILITY[part], result.to_dict())
            evaluation = result.evaluation
            report_images(classifier.path, classifier, dataset.root, samples, logits_NK, evaluation, part)
            update_manifest(classifier.path, layout.INTERPRETABILITY[part], layout.REPORT, layout.CONFUSIONS)
    return result


def _listed(value_P: Tensor) -> list[float | None]:
    """Return a list with None for NaN, which is not JSON."""
    return [value if math.isfinite(value) else None for value in value_P.tolist()]
