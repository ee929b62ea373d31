"""What explanations cost next to the network's own work, at the size of CUB-200: 200 classes, 2,000 prototypes.

    python benchmarks/bench_explain.py [--device cpu|cuda|mps] [--backbone resnet34] [--images 64]

Every ratio comes from one run, its two sides measured in turn. Exit code 1 where a goal is missed.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from likethat.classifier import Classifier, Prototype
from likethat.config import resolve
from likethat.data.loaders import Images
from likethat.explaining.explanation import explain_batch
from likethat.models.protopnet import create_protopnet
from likethat.runtime import exact_arithmetic
from likethat.training.engine import score_images
from likethat.training.nearest import nearest_patches

CLASSES, PER_CLASS, K, ROUNDS = 200, 10, 5, 3
SHARE = 0.01  # of the connections to other classes that are not zero
GOAL_EXPLAIN, GOAL_SEARCH = 1.5, 1.3


def make_classifier(folder: Path, backbone: str, device: torch.device) -> Classifier:
    """Random weights: they cost what trained ones cost."""
    torch.manual_seed(0)
    config = resolve("paper", backbone=backbone, weights="none", prototypes_per_class=PER_CLASS)
    model = create_protopnet(config.model, [PER_CLASS] * CLASSES)
    with torch.no_grad():
        weight_KP = model.last_layer.weight
        weight_KP.mul_(model.own_KP | (torch.rand_like(weight_KP) < SHARE))
    (folder / "prototypes").mkdir()
    Image.new("RGB", (90, 70), "teal").save(folder / "prototypes" / "part.jpg")
    box = (10.0, 10.0, 50.0, 50.0)
    prototypes = [
        Prototype(p, p // PER_CLASS, f"class {p // PER_CLASS}", "a.jpg", "", 0, 0, box, box, None, 0.1,
                  "prototypes/part.jpg", "prototypes/part.jpg", box)
        for p in range(CLASSES * PER_CLASS)
    ]  # fmt: skip
    return Classifier(folder, [f"class {k}" for k in range(CLASSES)], [model.to(device)], prototypes)


def seconds(function: Callable[[], object], device: torch.device) -> float:
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


def in_turn(
    first: Callable[[], object], second: Callable[[], object], device: torch.device, rounds: int
) -> list[float]:
    """The median seconds of each after one round to warm up."""
    pairs = [(seconds(first, device), seconds(second, device)) for _ in range(rounds + 1)][1:]
    return [float(np.median(times)) for times in zip(*pairs, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "mps"))
    parser.add_argument("--backbone", default="resnet34")
    parser.add_argument("--images", type=int, default=64, help="pictures that the atlas search goes through")
    args = parser.parse_args()
    device = torch.device(args.device)
    exact_arithmetic()
    with tempfile.TemporaryDirectory() as name:
        classifier = make_classifier(Path(name), args.backbone, device)
        (model,) = classifier.networks
        noise = np.random.default_rng(0)
        picture = Image.fromarray(noise.integers(0, 256, (375, 500, 3), np.uint8))
        batch = [classifier.prepare(picture)]
        forward, explained = in_turn(
            lambda: classifier.outputs(batch), lambda: explain_batch(classifier, batch), device, 5 * ROUNDS
        )
        (explanation,) = explain_batch(classifier, batch)
        drawing = seconds(lambda: explanation.save(Path(name) / "sheet.png"), device)
        page = seconds(lambda: explanation.save(Path(name) / "page.html"), device)

        height, width = model.backbone.input_size
        pixels = torch.from_numpy(noise.integers(0, 256, (args.images, height, width, 3), np.uint8)).to(device)
        images = Images(pixels, torch.arange(args.images, device=device) % CLASSES, device)
        inference, search = in_turn(
            lambda: score_images(model, images), lambda: nearest_patches(model, images, K), device, ROUNDS
        )

    goals = [
        ("explaining one picture", explained, "its forward pass", forward, GOAL_EXPLAIN),
        (f"{K} nearest patches of {args.images} pictures", search, "an inference pass", inference, GOAL_SEARCH),
    ]
    print(f"{args.backbone} at {height}x{width}, {CLASSES} classes, {CLASSES * PER_CLASS} prototypes; {device}")
    print(f"{'':36}{'seconds':>9}   {'next to':20}{'seconds':>9}{'ratio':>8}  goal")
    for what, took, other, other_took, goal in goals:
        print(f"{what:36}{took:9.4f}   {other:20}{other_took:9.4f}{took / other_took:8.2f}  <= {goal}")
    print(f"drawing, apart: the sheet as PNG {drawing:.3f} s, the page {page:.3f} s")
    met = all(took <= goal * other_took for _, took, _, other_took, goal in goals)
    print("all goals met" if met else "A GOAL WAS MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
