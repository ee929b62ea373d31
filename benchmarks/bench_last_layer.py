"""The convex last layer at the size of CUB-200 against the 20 passes it replaces.

    python benchmarks/bench_last_layer.py [--device cpu|cuda|mps] [--batches 3]

Prints one row a contender, with the ratio to the solver's time next to its goal. Exit code 1 where a goal is missed.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import timm
import torch
from torch import Tensor
from torch.nn import functional as F

from likethat.training.last_layer import objective, solve_last_layer

IMAGES, CLASSES, PER_CLASS = 5_994, 200, 10
PASSES, BATCH, LEARNING_RATE, LAM, TOL = 20, 80, 1e-4, 1e-4, 1e-5
GOAL_RATIO = 50.0  # times faster than the network's passes
GOAL_SECONDS = {"cpu": 60.0, "cuda": 2.0, "mps": 60.0}
Result = TypeVar("Result")


def synthetic_scores(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, labels and prototype classes as a trained ProtoPNet gives them.

    Six latent patches an image, from classes that overlap in groups of ten (one genus, say); prototypes are patches
    of training images, as after projection; score = log((d + 1) / (d + 1e-4)) of the nearest patch.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    patches, latent = 6, 16
    label_N = torch.arange(IMAGES) % CLASSES
    class_P = torch.arange(CLASSES).repeat_interleave(PER_CLASS)
    genus_K = torch.arange(CLASSES) // 10
    centre = 0.15 * normal(patches, latent) + 0.175 * normal(CLASSES // 10, patches, latent)[genus_K]
    centre = centre + 0.1 * normal(CLASSES, patches, latent)
    image = centre[label_N] + 0.15 * normal(IMAGES, patches, latent) + 0.09 * normal(IMAGES, 1, latent)
    # Image i has class i mod CLASSES, so this picks a random image of each prototype's class.
    source_P = class_P + CLASSES * torch.randint(IMAGES // CLASSES, class_P.shape, generator=generator)
    prototype = image[source_P, torch.randint(patches, class_P.shape, generator=generator)]
    distance_NP = torch.stack([torch.cdist(image[:, q], prototype).square() for q in range(patches)]).amin(0)
    return torch.log((distance_NP + 1) / (distance_NP + 1e-4)), label_N, class_P


def timed(function: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Seconds, all queued work included, and the result."""
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
    wait()
    start = time.perf_counter()
    result = function()
    wait()
    return time.perf_counter() - start, result


def network_pass_seconds(device: torch.device, batches: int) -> float:
    """One forward pass of a frozen ResNet-34 with a linear layer over all images, from the median of some batches."""
    network = timm.create_model("resnet34", pretrained=False, num_classes=CLASSES).eval().to(device)
    images = torch.randn(BATCH, 3, 224, 224, device=device)
    with torch.inference_mode():
        network(images)
        seconds = sorted(timed(lambda: network(images), device)[0] for _ in range(batches))
    return seconds[batches // 2] * math.ceil(IMAGES / BATCH)


def adam_passes(score_NP: Tensor, label_N: Tensor, class_P: Tensor) -> Tensor:
    """The paper's recipe on cached scores: start at +1 and -0.5, then 20 passes of Adam."""
    own_KP = class_P == torch.arange(CLASSES, device=class_P.device)[:, None]
    weight_KP = torch.where(own_KP, 1.0, -0.5).requires_grad_()
    optimizer = torch.optim.Adam([weight_KP], lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(PASSES):
        for index_B in torch.randperm(IMAGES, generator=generator).to(score_NP.device).split(BATCH):
            loss = F.cross_entropy(score_NP[index_B] @ weight_KP.T, label_N[index_B])
            loss = loss + LAM * weight_KP.masked_fill(own_KP, 0).abs().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weight_KP.detach()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=sorted(GOAL_SECONDS))
    parser.add_argument("--batches", type=int, default=3, help="network batches measured; the rest is extrapolated")
    args = parser.parse_args()
    device = torch.device(args.device)
    score_NP, label_N, class_P = data = tuple(tensor.to(device) for tensor in synthetic_scores())
    solve_last_layer(score_NP[:500], label_N[:500], class_P, CLASSES, max_iterations=2)  # warms the libraries up
    solve_seconds, solution = timed(lambda: solve_last_layer(*data, CLASSES, lam=LAM, tol=TOL), device)
    adam_seconds, adam_KP = timed(lambda: adam_passes(*data), device)
    network_seconds = PASSES * network_pass_seconds(device, args.batches)

    print(f"{IMAGES} images, {len(class_P)} prototypes, {CLASSES} classes; {device}")
    ratio = network_seconds / solve_seconds
    rows = [
        ("", "seconds", "times slower", "goal"),
        ("convex solve on cached scores", f"{solve_seconds:.2f}", "", f"<= {GOAL_SECONDS[args.device]:.0f} s"),
        (f"{PASSES} Adam passes on cached scores", f"{adam_seconds:.2f}", f"{adam_seconds / solve_seconds:.1f}", "-"),
        (
            f"{PASSES} passes of a frozen ResNet-34 *",
            f"{network_seconds:.2f}",
            f"{ratio:.1f}",
            f">= {GOAL_RATIO:.0f}",
        ),
    ]
    for name, seconds, slower, goal in rows:
        print(f"{name:36}{seconds:>10}{slower:>14}  {goal}")
    print(f"* forward only at 224 px, extrapolated from {args.batches} batches of {BATCH}")
    print(f"objective: solved {solution.objective:.6f}, Adam {objective(adam_KP, *data, lam=LAM):.6f}")
    print(
        f"residual {solution.kkt_residual:.1e} (goal <= {TOL:.0e}) after {solution.iterations} iterations; "
        f"{solution.nonzero_negative} of {CLASSES * len(class_P) - len(class_P)} other-class connections not zero"
    )
    met = solve_seconds <= GOAL_SECONDS[args.device] and ratio >= GOAL_RATIO and solution.kkt_residual <= TOL
    print("all goals met" if met else "A GOAL WAS MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
