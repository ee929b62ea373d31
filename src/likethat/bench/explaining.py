"""Explaining one picture against its forward pass."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from likethat.bench.measure import Figure, Goal, compare, in_turn
from likethat.bench.setting import Setting
from likethat.explaining.explanation import explain_batch
from likethat.runs.classifier import Classifier, Prototype

GOAL = Goal(1.5)
SHARE = 0.01  # of the connections to other classes that are not zero
TURNS = 5  # as many rounds as other measurements take: one picture is little work


def explain_figures(backbone: str, setting: Setting) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        classifier = make_classifier(Path(folder), backbone, setting)
        noise = np.random.default_rng(0).integers(0, 256, (375, 500, 3), np.uint8)
        batch = [classifier.prepare(Image.fromarray(noise))]
        contenders = [lambda: explain_batch(classifier, batch), lambda: classifier.outputs(batch)]
        explained, forward = in_turn(contenders, setting.device, TURNS * setting.rounds)
    return [compare(backbone, "explaining one picture", "its forward pass", explained, forward, GOAL)]


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
