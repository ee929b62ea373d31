"""Image classifiers that explain themselves: this part of the picture looks like that part of a training picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Classifier",
    "Explanation",
    "Prediction",
    "ProtoPNetClassifier",
    "UserError",
    "__version__",
    "explain",
    "load",
    "train",
]

if TYPE_CHECKING:
    from likethat.errors import UserError
    from likethat.estimator import ProtoPNetClassifier
    from likethat.explaining.explanation import Explanation, explain
    from likethat.runs.classifier import Classifier, Prediction, load
    from likethat.workflows.train import train

_HOMES = {
    "Classifier": "runs.classifier",
    "Explanation": "explaining.explanation",
    "Prediction": "runs.classifier",
    "ProtoPNetClassifier": "estimator",
    "UserError": "errors",
    "explain": "explaining.explanation",
    "load": "runs.classifier",
    "train": "workflows.train",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, since the command line must answer --help before torch is loaded."""
    if name not in _HOMES:
        raise AttributeError(f"module 'likethat' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"likethat.{_HOMES[name]}"), name)
