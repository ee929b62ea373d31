"""Logits of a batch against those of the bare classifier, in the precision of training and exactly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from likethat.bench.measure import BenchFigure, Goal, compare_times, in_turn
from likethat.bench.setting import Setting
from likethat.inference.passes import mixed_precision

THROUGHPUT = Goal(0.95, at_least=True)


@torch.no_grad()
def inference_figures(backbone: str, setting: Setting) -> list[BenchFigure]:
    device = setting.device
    model, baseline = setting.networks(setting.config("default", backbone))
    x_B3HW, _ = setting.pictures(setting.forward_batch).batch(torch.arange(setting.forward_batch))
    if setting.compile:
        model.compile(dynamic=False)
        baseline.compile(dynamic=False)
    goal = THROUGHPUT if device.type == "cuda" else None

    runs = max(1, setting.steps // 3)  # batches are larger than those of training

    def repeated(logits_of: Callable[[Tensor], object]) -> None:
        for _ in range(runs):
            logits_of(x_B3HW)

    contenders = [lambda: repeated(model), lambda: repeated(baseline)]
    exact, exact_bare = in_turn(contenders, device, setting.rounds)
    figures = [compare_times(backbone, "inference, fp32", "bare classifier", exact, exact_bare, goal, runs=runs)]
    if device.type == "cuda":
        with mixed_precision(device):
            mixed, mixed_bare = in_turn(contenders, device, setting.rounds)
        figures.append(
            compare_times(backbone, "inference, bf16", "bare classifier", mixed, mixed_bare, goal, runs=runs)
        )
    return figures
