"""Projection and nearest patches against a plain inference pass over the same images."""

from __future__ import annotations

import statistics

from likethat.bench.measure import BenchFigure, Goal, compare_peaks, compare_times, in_turn, with_peak
from likethat.bench.setting import Setting
from likethat.inference.nearest import nearest_patches
from likethat.inference.passes import classify_images
from likethat.training.project import project

GOAL = Goal(1.15)
NEAREST = 5


def pass_figures(backbone: str, setting: Setting) -> tuple[list[BenchFigure], float]:
    """Return the figures, and the seconds that the bare classifier spends on one image."""
    device, images = setting.device, setting.pictures(setting.images)
    model, baseline = setting.networks(setting.config("default", backbone))
    contenders = [
        lambda: classify_images(baseline, images),
        lambda: project(model, images, setting.names),
        lambda: nearest_patches(model, images, NEAREST),
    ]
    bare, projection, search = in_turn(contenders, device, setting.rounds)
    (peak, _), (our_peak, _) = (with_peak(contender, device) for contender in contenders[:2])
    figures = [
        compare_times(
            backbone, f"projection of {setting.prototypes} prototypes", "inference pass", projection, bare, GOAL
        ),
        compare_times(backbone, f"{NEAREST} nearest patches of each", "inference pass", search, bare, GOAL),
        *compare_peaks(backbone, "memory of projection", "inference pass", our_peak, peak),
    ]
    return figures, statistics.median(bare) / len(images)
