"""All measurements one after another: what `likethat bench` does."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from likethat.bench.inference import explain_figures, inference_figures, pass_figures
from likethat.bench.last_layer import last_layer_figures
from likethat.bench.measure import BenchFigure
from likethat.bench.setting import Setting, setting_of
from likethat.bench.training import training_figures
from likethat.progress import Display
from likethat.runtime import exact_arithmetic, resolve_device


@dataclass(frozen=True)
class BenchResult:
    setting: Setting
    figures: tuple[BenchFigure, ...]

    @property
    def met(self) -> bool:
        return all(figure.met for figure in self.figures)

    def to_dict(self) -> dict[str, Any]:
        return {**self.machine(), "met": self.met, "figures": [figure.to_dict() for figure in self.figures]}

    def machine(self) -> dict[str, Any]:
        setting, device = self.setting, self.setting.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        return {
            "device": f"{device} {name}".strip(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "input_size": setting.input_size,
            "classes": setting.classes,
            "prototypes": setting.prototypes,
            "batch_size": setting.batch,
            "compiled": setting.compile,
        }


def run_bench(device: str, quick: bool, compile: bool, display: Display) -> BenchResult:
    exact_arithmetic()
    setting = setting_of(resolve_device(device), quick, compile)
    figures: list[BenchFigure] = []
    parts: list[Callable[[], list[BenchFigure]]] = []
    for backbone in setting.backbones:
        parts += [
            partial(training_figures, backbone, setting, display.line),
            partial(inference_figures, backbone, setting),
        ]
    parts.append(partial(_first_backbone, setting))
    with display.task("measuring") as advance:
        for number, part in enumerate(parts):
            advance(number, len(parts))
            figures += part()
            if setting.device.type == "cuda":
                torch.cuda.empty_cache()  # what one network left behind must not crowd the next
    return BenchResult(setting, tuple(figures))


def _first_backbone(setting: Setting) -> list[BenchFigure]:
    backbone = setting.backbones[0]
    passes, seconds_of_image = pass_figures(backbone, setting)
    return [*passes, *explain_figures(backbone, setting), *last_layer_figures(backbone, setting, seconds_of_image)]
