"""Projection against one plain inference pass over the same images.

python benchmarks/bench_projection.py [--device cpu] [--images 256] [--backbone resnet34]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from likethat.config import resolve
from likethat.data.loaders import Images
from likethat.models.protopnet import create_protopnet
from likethat.runtime import exact_arithmetic, resolve_device
from likethat.training.engine import batches_of
from likethat.training.project import project

GOAL = 1.3
CLASSES, PER_CLASS, SIZE = 200, 10, 224
ROUNDS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--backbone", default="resnet34")
    args = parser.parse_args()
    device = resolve_device(args.device)
    exact_arithmetic()
    torch.manual_seed(0)
    config = resolve("paper", backbone=args.backbone, weights="none", input_size=SIZE).model
    model = create_protopnet(config, [PER_CLASS] * CLASSES).to(device).eval()
    pixels = torch.randint(256, (args.images, SIZE, SIZE, 3), dtype=torch.uint8).to(device)
    images = Images(pixels, torch.arange(args.images, device=device) % CLASSES, device)
    names = tuple(map(str, range(CLASSES)))

    @torch.no_grad()
    def infer() -> None:
        for _, x_B3HW, _ in batches_of(images):
            model.backbone(x_B3HW)

    def seconds(function: Callable[[], object]) -> float:
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    infer()
    # Alternating, and the best of each: other work on the machine only ever adds time.
    pairs = [(seconds(infer), seconds(lambda: project(model, images, names))) for _ in range(ROUNDS)]
    inference, projection = (min(column) for column in zip(*pairs, strict=True))
    ratio = projection / inference
    print(f"{args.backbone} on {device}, {args.images} images, {CLASSES * PER_CLASS} prototypes")
    print(f"bare backbone, one pass   {inference:8.2f} s")
    print(f"projection                {projection:8.2f} s   {ratio:.2f} times (goal: at most {GOAL})")
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
