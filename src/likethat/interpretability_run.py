"""How good a run's explanations are: what `likethat evaluate --interpretability` does."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from likethat import run_dir
from likethat.checkpoint import write_json
from likethat.classifier import Classifier
from likethat.data.parts import read_parts
from likethat.metrics.accuracy import Evaluation, evaluate_logits
from likethat.metrics.background import Background
from likethat.metrics.consistency import Consistency
from likethat.metrics.coverage import Coverage
from likethat.metrics.decisive import Decisive
from likethat.metrics.degradation import Degradation
from likethat.metrics.deletion import Deletion
from likethat.metrics.figure import Figure
from likethat.metrics.leakage import Leakage
from likethat.metrics.misalignment import Misalignment
from likethat.metrics.purity import Purity
from likethat.metrics.receptive_field import ReceptiveField
from likethat.metrics.redundancy import Redundancy
from likethat.metrics.sparsity import Sparsity
from likethat.metrics.stability import Stability
from likethat.metrics.sweep import Metric, Subject, sweep
from likethat.metrics.transformations import Transformations
from likethat.pipeline import explain_some
from likethat.progress import Display
from likethat.report.html import write_report
from likethat.run_data import is_training_data, open_test_data

# In the order of the tables.
METRICS: tuple[type[Metric], ...] = (
    Consistency,
    Stability,
    Purity,
    Coverage,
    Decisive,
    Transformations,
    Degradation,
    Misalignment,
    ReceptiveField,
    Deletion,
    Leakage,
    Background,
    Redundancy,
    Sparsity,
)


@dataclass(frozen=True)
class Interpretability:
    """All figures, and what each prototype contributed to them (None where that is not known)."""

    evaluation: Evaluation
    data: str
    seconds: float
    figures: tuple[Figure, ...]
    by_prototype: dict[str, list[float | None]]

    def to_dict(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "seconds": round(self.seconds, 1),
            "evaluation": self.evaluation.to_dict(),
            "figures": [figure.to_dict() for figure in self.figures],
            "by_prototype": self.by_prototype,
        }


def evaluate_interpretability(classifier: Classifier, data: str | None, display: Display) -> Interpretability:
    """Measures a run on its test images, keeps the result in the run folder and shows it in the report; or measures it
    on other data, and then leaves the run as it is."""
    started = time.monotonic()
    dataset, part = open_test_data(classifier, data)
    subject = Subject(classifier, dataset.root, dataset.test, read_parts(dataset))
    metrics = [kind(subject) for kind in METRICS]
    logits_NK = sweep(subject, metrics, display)
    result = Interpretability(
        evaluate_logits(logits_NK, subject.label_N, classifier.classes, part),
        str(dataset.root),
        time.monotonic() - started,
        tuple(figure for metric in metrics for figure in metric.figures()),
        {name: _listed(value_P) for metric in metrics for name, value_P in metric.by_prototype().items()},
    )
    if data is None or is_training_data(classifier, dataset):
        write_json(classifier.path / run_dir.INTERPRETABILITY, result.to_dict())
        write_report(classifier.path, classifier, explain_some(classifier, dataset, logits_NK))
    return result


def _listed(value_P: Tensor) -> list[float | None]:
    """NaN is not JSON."""
    return [value if math.isfinite(value) else None for value in value_P.tolist()]
