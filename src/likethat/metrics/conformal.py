"""Do prediction sets keep their promise on test images?

Definition (Vovk, Gammerman, Shafer 2005, "Algorithmic learning in a random world"): the share of images whose true
class is in the prediction set, next to the level that was promised, which holds on average over new pictures. A class
is in the set if 1 - its probability is at most what the (n + 1) x level-th of n validation images has.

Limits: validation images also chose among the cycles of training, and few of them make sets coarse. The promise is
about all classes together: single ones may do worse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from likethat.metrics.figure import LOWER, NEITHER, About, MetricFigure
from likethat.runs.calibration import LEVEL, LEVELS, Calibration, likeness_of

GROUP, SOURCE = "trust", "Vovk et al. 2005"
SIZE = About(f"classes in a prediction set at {LEVEL:.0%}", LOWER, GROUP, SOURCE, unit="classes")
ABSTAINS = About(f"abstains on known classes at {LEVEL:.0%}", LOWER, GROUP, "this project")


def conformal_figures(
    calibration: Calibration | None, logits_NK: Tensor, label_N: Tensor, *, fitted_here: bool = False
) -> list[MetricFigure]:
    """Measure what promises are worth; not on the images that the run was calibrated on (`fitted_here`)."""
    abouts = {level: About(f"true class in the set, promised {level:.0%}", NEITHER, GROUP, SOURCE) for level in LEVELS}
    if calibration is None or fitted_here:
        why = "the run is not calibrated; `likethat calibrate RUN` does that"
        why = "validation images made the promise, and only other images can test it" if fitted_here else why
        return [about.absent(why) for about in (*abouts.values(), SIZE, ABSTAINS)]
    note = f"{len(label_N)} images; calibrated on {len(calibration.likeness)}"
    probability_NK = logits_NK.cpu().double().softmax(1)
    sets = {level: calibration.prediction_sets(probability_NK, level) for level in LEVELS}
    figures = [
        about.proportion(sets[level].gather(1, label_N.cpu()[:, None])[:, 0], note)
        if calibration.informs(level)
        else about.absent(f"{note}, too few to exclude any class")
        for level, about in abouts.items()
    ]
    size_N = sets[LEVEL].sum(1)
    unlike_N = torch.tensor([calibration.is_unlike(likeness) for likeness in likeness_of(logits_NK).tolist()])
    alone = f"{(size_N == 1).double().mean():.1%} of the images have one"
    figures.append(SIZE.mean(size_N, f"{note}; {alone}"))
    figures.append(ABSTAINS.proportion(unlike_N | (size_N == 0), note))
    return figures
