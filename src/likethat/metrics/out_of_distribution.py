"""Are pictures of unknown things told from those of known ones?

Definition (Hendrycks, Gimpel 2017, "A baseline for detecting misclassified and out-of-distribution examples in neural
networks", ICLR): pictures of known classes should look more like anything known than other pictures do. A picture's
likeness is the points of the class that gets most. AUROC: how often a known picture has more of it than another one
(ties count half). FPR95: the share of other pictures above the likeness that 95 % of the known ones reach. Also: the
share of other pictures on which the model abstains.

Limits: both figures say as much about the other pictures as about the model; name them with the figure.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from likethat.metrics.figure import HIGHER, LOWER, RESAMPLES, About, MetricFigure
from likethat.metrics.unbalanced import mid_ranks
from likethat.runs.calibration import LEVEL, Calibration, likeness_of

GROUP, SOURCE = "trust", "Hendrycks, Gimpel 2017"
AUROC = About("AUROC of likeness, known against other pictures", HIGHER, GROUP, SOURCE)
FPR95 = About("other pictures above 95% of known ones", LOWER, GROUP, SOURCE)
ABSTAINS = About(f"abstains on other pictures at {LEVEL:.0%}", HIGHER, GROUP, "this project")
NONE_GIVEN = "no other pictures were given; name a folder of some with --ood FOLDER"


def auroc(known_n: np.ndarray, other_m: np.ndarray) -> float:
    """Return how often a known value is the larger one of a pair; equal ones count half."""
    count = len(known_n)
    rank_n = mid_ranks(np.concatenate([known_n, other_m]))[:count]  # among all; the least possible sum is taken away
    return float((rank_n.sum() - count * (count + 1) / 2) / (count * len(other_m)))


def fpr95(known_n: np.ndarray, other_m: np.ndarray) -> float:
    """Return the share of other values that reach what 95 % of the known ones reach."""
    least = np.sort(known_n)[::-1][math.ceil(0.95 * len(known_n)) - 1]
    return float((other_m >= least).mean())


def out_of_distribution_figures(
    calibration: Calibration | None, known_NK: Tensor, other_MK: Tensor | None, what: str
) -> list[MetricFigure]:
    """Measure how well other pictures are told from known ones; `what` says which the others are."""
    if other_MK is None:
        return [about.absent(NONE_GIVEN) for about in (AUROC, FPR95, ABSTAINS)]
    known_n, other_m = (likeness_of(logits).cpu().double().numpy() for logits in (known_NK, other_MK))
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(RESAMPLES):
        values = generator.choice(known_n, len(known_n)), generator.choice(other_m, len(other_m))
        drawn.append((auroc(*values), fpr95(*values)))
    intervals = np.percentile(drawn, [2.5, 97.5], axis=0).T.tolist()
    note = f"{len(known_n)} images against {len(other_m)}: {what}"
    figures = [
        about.measured(measure(known_n, other_m), (low, high), note)
        for (about, measure), (low, high) in zip(((AUROC, auroc), (FPR95, fpr95)), intervals, strict=True)
    ]
    if calibration is None:
        return [*figures, ABSTAINS.absent("the run is not calibrated; `likethat calibrate RUN` does that")]
    unlike_M = torch.tensor([calibration.is_unlike(likeness) for likeness in other_m.tolist()])
    empty_M = ~calibration.prediction_sets(other_MK.cpu().double().softmax(1), LEVEL).any(1)
    return [*figures, ABSTAINS.proportion(unlike_M | empty_M, f"{len(other_m)} pictures: {what}")]
