"""What prototypes cost where nothing is learned: logits of a batch, passes over images, and explaining one picture."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from likethat.bench.measure import BenchFigure, Goal, compare_peaks, compare_times, in_turn, with_peak
from likethat.bench.setting import Setting
from likethat.explaining.explanation import explain_batch
from likethat.inference.nearest import nearest_patches
from likethat.inference.passes import classify_images, mixed_precision
from likethat.runs.classifier import Classifier, Prototype
from likethat.training.project import project

THROUGHPUT, PASS_TIME, EXPLAINING_TIME = Goal(0.95, at_least=True), Goal(1.15), Goal(1.5)
NEAREST = 5
SHARE = 0.01  # of the connections to other classes that are not zero
TURNS = 5  # as many rounds as other measurements take: explaining one picture is little work


@torch.no_grad()
def inference_figures(backbone: str, setting: Setting) -> list[BenchFigure]:
    """Compare logits of a batch with those of the bare classifier, in the precision of training and exactly."""
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


def pass_figures(backbone: str, setting: Setting) -> tuple[list[BenchFigure], float]:
    """Compare projection and nearest patches with a plain pass over the same images; return also the seconds that the
    bare classifier spends on one image."""
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
            backbone, f"projection of {setting.prototypes} prototypes", "inference pass", projection, bare, PASS_TIME
        ),
        compare_times(backbone, f"{NEAREST} nearest patches of each", "inference pass", search, bare, PASS_TIME),
        *compare_peaks(backbone, "memory of projection", "inference pass", our_peak, peak),
    ]
    return figures, statistics.median(bare) / len(images)


def explain_figures(backbone: str, setting: Setting) -> list[BenchFigure]:
    """Compare explaining one picture with its forward pass."""
    with tempfile.TemporaryDirectory() as folder:
        classifier = make_classifier(Path(folder), backbone, setting)
        noise = np.random.default_rng(0).integers(0, 256, (375, 500, 3), np.uint8)
        batch = [classifier.prepare(Image.fromarray(noise))]
        contenders = [lambda: explain_batch(classifier, batch), lambda: classifier.outputs(batch)]
        explained, forward = in_turn(contenders, setting.device, TURNS * setting.rounds)
    return [compare_times(backbone, "explaining one picture", "its forward pass", explained, forward, EXPLAINING_TIME)]


def make_classifier(folder: Path, backbone: str, setting: Setting) -> Classifier:
    model, _ = setting.networks(setting.config("default", backbone))
    with torch.no_grad():
        weight_KP = model.last_layer.weight
        weight_KP.mul_(model.own_KP | (torch.rand_like(weight_KP) < SHARE))
    (folder / "prototypes").mkdir()
    Image.new("RGB", (90, 70), "teal").save(folder / "prototypes" / "part.jpg")
    box, picture = (10.0, 10.0, 50.0, 50.0), "prototypes/part.jpg"
    prototypes = [
        Prototype(p, label, f"class {label}", "a.jpg", "", 0, 0, box, box, None, 0.1, picture, picture, box)
        for p, label in enumerate(model.prototype_layer.class_P.tolist())
    ]
    return Classifier(folder, [f"class {name}" for name in setting.names], [model], prototypes)
