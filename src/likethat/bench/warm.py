"""A warm epoch on kept feature maps (`--warm-views`) against one through the frozen backbone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from likethat.bench.measure import BenchFigure, Goal, compare_times, in_turn
from likethat.bench.setting import Setting
from likethat.bench.training import Tell, step_of
from likethat.config import Config
from likethat.data.loaders import training_batches
from likethat.training.phases import Step
from likethat.training.state import Progress
from likethat.training.train_step import FreshViews, Source
from likethat.training.view_maps import cached_view_maps

FASTER = Goal(5.0, at_least=True, unit=" times")
FASTER_CUDA = Goal(2.0, at_least=True, unit=" times")  # there a backbone that goes only forward costs little


def warm_figures(backbone: str, setting: Setting, tell: Tell) -> list[BenchFigure]:
    """The epochs show one view of every image."""
    images, config = setting.pictures(setting.images), setting.config("paper", backbone)
    on_maps = replace(config, train=replace(config.train, warm_views=1))
    frozen = setting.networks(config)[0].backbone

    def epoch(config: Config, source: Source) -> Callable[[], None]:
        step = step_of(Progress(setting.networks(config)[0]), Step("warm"), config, source, setting, tell)
        batches = training_batches(len(images), setting.batch, 1, seed=0)

        def turn() -> None:
            for number, index_B in enumerate(batches):
                step(index_B, number)

        return turn

    with tempfile.TemporaryDirectory() as folder:
        make = (frozen, images, on_maps, Path(folder) / "maps", lambda: None)

        def make_maps() -> None:
            with cached_view_maps(*make):
                pass

        with cached_view_maps(*make) as maps:
            contenders = [epoch(config, FreshViews(images, config.augment)), epoch(on_maps, maps), make_maps]
            through, kept, making = in_turn(contenders, setting.device, setting.rounds)
    against, goal = "through the backbone", FASTER_CUDA if setting.device.type == "cuda" else FASTER
    return [
        compare_times(backbone, "warm epoch on kept feature maps", against, kept, through, goal),
        compare_times(backbone, "keeping the maps of one view", f"warm epoch {against}", making, through),
    ]
