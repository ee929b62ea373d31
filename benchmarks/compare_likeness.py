"""How well a run tells pictures of unknown things from its test images, by several measures of likeness, and how far
its promises hold on the test images.

    python benchmarks/compare_likeness.py RUN --ood FOLDER [FOLDER ...] [--data DATA] [--device cpu|cuda|mps]
"""

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from likethat.data.cache import decode_samples
from likethat.data.dataset import DataSet
from likethat.data.loaders import hold
from likethat.inference.passes import score_images
from likethat.metrics.conformal import conformal_figures
from likethat.metrics.figure import MetricFigure
from likethat.metrics.out_of_distribution import auroc, fpr95, out_of_distribution_figures
from likethat.metrics.reliability import calibration_figures
from likethat.models.protopnet import logits_of_scores
from likethat.runs.classifier import Classifier, load
from likethat.runs.data import open_out_of_distribution, open_test_data


def scores_of(classifier: Classifier, dataset: DataSet) -> Tensor:
    """N x P, of the test part."""
    network = classifier.networks[0]
    decoded = decode_samples(dataset.root, dataset.test, network.backbone.input_size)
    return score_images(network, hold(decoded.pixels, dataset.test, classifier.device)).cpu()


def likenesses(classifier: Classifier) -> dict[str, Callable[[Tensor], Tensor]]:
    weight_KP, class_P = classifier.weight_KP.cpu(), classifier.networks[0].prototype_layer.class_P.cpu()

    def class_mean(score_NP: Tensor) -> Tensor:
        return torch.stack([score_NP[:, class_P == k].mean(1) for k in class_P.unique()], 1).amax(1)

    return {
        "points of the class with most (what likethat uses)": lambda score_NP: (
            logits_of_scores(score_NP, weight_KP)
        ).amax(1),
        "mean similarity to a class's prototypes, the largest": class_mean,
        "similarity to the nearest prototype": lambda score_NP: score_NP.amax(1),
        "probability of the predicted class": lambda score_NP: logits_of_scores(score_NP, weight_KP).softmax(1).amax(1),
    }


def print_figures(figures: Sequence[MetricFigure]) -> None:
    for figure in figures:
        value, interval = figure.shown()
        print(f"| {figure.name} | {value} | {interval} | {figure.note} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--ood", nargs="+", required=True)
    parser.add_argument("--data")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    classifier = load(args.run, args.device)
    assert len(classifier.networks) == 1, "one network at a time"
    weight_KP = classifier.weight_KP.cpu()
    dataset, _ = open_test_data(classifier, args.data)
    known_NP = scores_of(classifier, dataset)
    label_N = torch.tensor([sample.label for sample in dataset.test])
    print("| | value | 95 % interval | measured on |\n|---|---|---|---|")
    print_figures(calibration_figures(logits_of_scores(known_NP, weight_KP), label_N))
    print_figures(conformal_figures(classifier.calibration, logits_of_scores(known_NP, weight_KP), label_N))
    for folder in args.ood:
        other_MP = scores_of(classifier, open_out_of_distribution(classifier, folder))
        print_figures(
            out_of_distribution_figures(
                classifier.calibration,
                logits_of_scores(known_NP, weight_KP),
                logits_of_scores(other_MP, weight_KP),
                folder,
            )
        )
        print(f"\n| likeness, against {len(other_MP)} of {folder} | AUROC | FPR95 |\n|---|---|---|")
        for name, likeness in likenesses(classifier).items():
            known_n, other_m = (likeness(scores).double().numpy() for scores in (known_NP, other_MP))
            print(f"| {name} | {auroc(known_n, other_m):.1%} | {fpr95(known_n, other_m):.1%} |")
        print()


if __name__ == "__main__":
    main()
