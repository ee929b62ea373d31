"""Which attribution finds the pixels that similarities hang on: a table of deletion curves for a run's test images.

    python benchmarks/compare_attributions.py RUN [--data DATA] [--images 24] [--device cpu|cuda|mps]

For each image the three prototypes that give the predicted class most points are located by every method; then the
pixels go in that order. The table says how much of the similarity is left, with the 95 % interval over the images.
"""

import argparse
import time

import torch
from pixel_deletion import deletion_curves
from torch import Tensor

from likethat.data.loaders import to_unit
from likethat.explaining.attribution import TITLES, attribute, flat
from likethat.metrics.figure import bootstrap_interval
from likethat.metrics.reveal import blurred
from likethat.runs.classifier import load
from likethat.runs.data import open_test_data

SHARES = (0.02, 0.05, 0.1, 0.2)
LEADING = 3
RANDOM = "random patches"
FILLINGS = {"mean colour": flat, "blur": lambda x_3HW: blurred(x_3HW[None])[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--data")
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    classifier = load(args.run, args.device)
    dataset, _ = open_test_data(classifier, args.data)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(dataset.test), generator=generator)[: args.images].tolist()
    network = classifier.networks[0]
    left: dict[tuple[str, str], list[Tensor]] = {}
    seconds = dict.fromkeys((*TITLES, RANDOM), 0.0)
    for number in chosen:
        sample = dataset.test[number]
        pixels = classifier.prepare(dataset.root / sample.path, sample.box).pixels[0]
        x_3HW = to_unit(pixels.to(classifier.device))
        with torch.no_grad():
            output = network(x_3HW[None])
        points_P = output.score_BP[0] * network.last_layer.weight[output.logits_BK[0].argmax()]
        leading_p = points_P.topk(LEADING).indices
        for method in seconds:
            started = time.monotonic()
            if method == RANDOM:
                map_pHW = torch.rand((LEADING, 14, 14), generator=generator)
            else:
                map_pHW = attribute(network, x_3HW, leading_p, method)
            seconds[method] += time.monotonic() - started
            for name, filling in FILLINGS.items():
                curve_pq = deletion_curves(network, x_3HW, leading_p, map_pHW, SHARES, filling(x_3HW))
                left.setdefault((method, name), []).append(curve_pq.mean(0).cpu())
    heads = [f"{share:.0%} removed" for share in SHARES]
    print(f"{len(chosen)} test images, {LEADING} prototypes each; similarity left\n")
    print(f"| order of pixels | filling | {' | '.join(heads)} | seconds an image |\n|{'---|' * (len(SHARES) + 3)}")
    for (method, name), curves in left.items():
        share_Nq = torch.stack(curves).double()
        cells = []
        for share_N in share_Nq.T:
            low, high = bootstrap_interval(share_N.numpy())
            cells.append(f"{share_N.mean():.1%} ({low:.1%} to {high:.1%})")
        print(f"| {method} | {name} | {' | '.join(cells)} | {seconds[method] / len(chosen):.2f} |")


if __name__ == "__main__":
    main()
