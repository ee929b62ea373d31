"""One pass over the images in which every metric collects what it needs.

A metric is a class with `collect`, called with every batch, and `figures`, called at the end. What several metrics
look at (the networks' answer, the evidence for the prediction, the answer under noise) is worked out once a batch,
when the first of them asks. Images that metrics with many passes are measured on come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from likethat.data.cache import CHUNK, decode_chunk
from likethat.data.dataset import IMAGES_OF, Sample
from likethat.data.loaders import hold
from likethat.data.parts import PartTable
from likethat.metrics.figure import MetricFigure
from likethat.metrics.regions import Reading
from likethat.progress import Display
from likethat.runs.classifier import Classifier
from likethat.runtime import seed_for

Result = TypeVar("Result")

EVIDENCE = 10  # prototypes that count as the evidence of a prediction, at most
NOISE, MOST_NOISE = 0.2, 0.25  # standard deviation and bound, of a picture normalised as follows (Huang et al. 2023)
IMAGENET_STD = (0.229, 0.224, 0.225)  # whatever the backbone's own normalisation, so that all get the same noise
# How many images are measured under perturbations, and under attack; a CPU takes fewer. See `Subject.sample_note`.
PERTURBED = {"cpu": 96, "mps": 256, "cuda": 1024}
ATTACKED = {"cpu": 24, "mps": 64, "cuda": 256}
BATCH = {"cpu": 32, "mps": 32, "cuda": 128}
COST_PERTURBED, COST_ATTACKED = 40, 220  # passes that such an image takes, roughly: for the time left


@dataclass(frozen=True)
class Subject:
    """The model that is measured and its images."""

    classifier: Classifier
    root: Path
    samples: tuple[Sample, ...]
    parts: PartTable | None
    part: str = "test"  # "val", "test" or "all": which images of the data these are
    train: tuple[Sample, ...] = ()  # the run's training images, where they are at hand

    @cached_property
    def class_P(self) -> Tensor:
        labels = [prototype.label for prototype in self.classifier.prototypes]
        return torch.tensor(labels, device=self.classifier.device)

    @cached_property
    def weight_KP(self) -> Tensor:
        return self.classifier.weight_KP

    @cached_property
    def label_N(self) -> Tensor:
        return torch.tensor([sample.label for sample in self.samples])

    @property
    def perturbed(self) -> int:
        return min(len(self.samples), PERTURBED[self.classifier.device.type])

    @property
    def attacked(self) -> int:
        return min(len(self.samples), ATTACKED[self.classifier.device.type])

    @cached_property
    def order_N(self) -> Tensor:
        """Return the same shuffled order every time: its first images are a fair sample of all."""
        return torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(seed_for("sweep")))

    @property
    def kind(self) -> str:
        """Say what the images are called in notes."""
        return IMAGES_OF.get(self.part, "images")

    @property
    def view_note(self) -> str:
        """Say how the networks see the images."""
        sizes = dict.fromkeys(network.backbone.input_size for network in self.classifier.networks)
        crop = "cropped to the box" if any(sample.box for sample in self.samples) else "whole"
        return f"{crop}, squashed to {' and '.join(f'{width}x{height}' for height, width in sizes)}"

    def pixels_note(self, count: int) -> str:
        """Say a length that is `count` pixels in a picture of 224x224, in pixels of the networks' inputs."""
        sides = dict.fromkeys(network.backbone.input_size[1] for network in self.classifier.networks)
        here = " and ".join(f"{count * side / 224:.3g}" for side in sides)
        return f"{here} px" if list(sides) == [224] else f"{here} px ({count} at 224)"

    def sample_note(self, count: int) -> str:
        total = len(self.samples)
        return f"{count} {self.kind}" if count == total else f"{count} of {total} {self.kind}, drawn once and for all"


@dataclass(frozen=True)
class Evidence:
    """The prototypes that give the predicted class most points, most first. Where there are fewer, or they give none,
    `counts` is False."""

    reading: Reading
    prototype_BE: Tensor
    points_BE: Tensor
    counts_BE: Tensor
    total_B: Tensor  # points of all prototypes that give some

    @cached_property
    def box_BE4(self) -> Tensor:
        image_BE = torch.arange(len(self.points_BE), device=self.points_BE.device)[:, None].expand_as(self.points_BE)
        box_S4 = self.reading.boxes(image_BE.flatten(), self.prototype_BE.flatten())
        return box_S4.unflatten(0, self.points_BE.shape)


class Batch:
    """Some images, and what is known and worked out about them."""

    def __init__(
        self,
        subject: Subject,
        index_B: Tensor,
        x: Sequence[Tensor],
        part_BQ4: Tensor | None,
        object_B4: Tensor | None,
        *,
        perturbed: bool,
        attacked: bool,
    ) -> None:
        self.subject = subject
        self.index_B = index_B  # number of the image in subject.samples
        self.x = tuple(x)  # B3HW in [0, 1], one a member
        self.part_BQ4 = part_BQ4
        self.object_B4 = object_B4
        self.perturbed, self.attacked = perturbed, attacked
        self.device = subject.classifier.device
        self.computed: dict[str, Any] = {}
        self.label_B = subject.label_N[index_B].to(self.device)

    def __len__(self) -> int:
        return len(self.index_B)

    @torch.no_grad()
    def read(self, x: Sequence[Tensor]) -> Reading:
        networks = self.subject.classifier.networks
        return Reading(networks, [network(x_B3HW) for network, x_B3HW in zip(networks, x, strict=True)])

    def once(self, key: str, make: Callable[[Batch], Result]) -> Result:
        """Return `make(self)`, computed when the first of several metrics asks for it."""
        if key not in self.computed:
            self.computed[key] = make(self)
        result: Result = self.computed[key]
        return result

    @cached_property
    def clean(self) -> Reading:
        return self.read(self.x)

    @cached_property
    def noisy(self) -> Reading:
        """Return the reading under the noise of Huang et al. 2023."""
        generator = torch.Generator(self.device).manual_seed(seed_for("noise", int(self.index_B[0])))
        return self.read([add_noise(x_B3HW, generator) for x_B3HW in self.x])

    @cached_property
    def predicted_B(self) -> Tensor:
        return self.clean.logits_BK.argmax(1)

    @cached_property
    def own_pairs(self) -> tuple[Tensor, Tensor]:
        """Return image in the batch and prototype, for all prototypes of the image's own class."""
        image_S, prototype_S = (self.label_B[:, None] == self.subject.class_P).nonzero().unbind(1)
        return image_S, prototype_S

    @cached_property
    def evidence(self) -> Evidence:
        points_BP = self.clean.score_BP * self.subject.weight_KP[self.predicted_B]
        points_BE, prototype_BE = points_BP.topk(min(EVIDENCE, points_BP.shape[1]), dim=1)
        return Evidence(self.clean, prototype_BE, points_BE, points_BE > 0, points_BP.clamp(min=0).sum(1))


class Metric:
    """What all metrics do. `by_prototype` gives P values each, NaN where nothing is known, by name."""

    on_training_images = False  # whether it is shown the training images instead of those measured

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def collect(self, batch: Batch) -> None:
        raise NotImplementedError

    def figures(self) -> list[MetricFigure]:
        raise NotImplementedError

    def by_prototype(self) -> Mapping[str, Tensor]:
        return {}


def add_noise(x_B3HW: Tensor, generator: torch.Generator) -> Tensor:
    noise_B3HW = torch.randn(x_B3HW.shape, generator=generator, device=x_B3HW.device) * NOISE
    std_311 = torch.tensor(IMAGENET_STD, device=x_B3HW.device)[:, None, None]
    return x_B3HW + noise_B3HW.clamp(-MOST_NOISE, MOST_NOISE) * std_311


def sweep(subject: Subject, metrics: Sequence[Metric], display: Display) -> Tensor:
    """Show every image once to every metric, and training images to those that want them instead; return the logits
    of all images, N x K, in the order of the samples."""
    logits_NK = torch.zeros(len(subject.samples), len(subject.classifier.classes))
    learned = [metric for metric in metrics if metric.on_training_images]
    metrics = [metric for metric in metrics if not metric.on_training_images]
    sizes = [subject.attacked, subject.perturbed - subject.attacked, len(subject.samples) - subject.perturbed]
    costs = [COST_ATTACKED, COST_PERTURBED, 2]
    total = sum(size * cost for size, cost in zip(sizes, costs, strict=True))
    done, start = 0, 0
    with display.task("measuring") as advance:
        for size, cost in zip(sizes, costs, strict=True):
            for index_C in subject.order_N[start : start + size].split(CHUNK):
                for batch in _batches(subject, index_C, perturbed=cost > 2, attacked=cost == COST_ATTACKED):
                    logits_NK[batch.index_B] = batch.clean.logits_BK.cpu()
                    for metric in metrics:
                        metric.collect(batch)
                    done += cost * len(batch)
                    advance(done, total)
            start += size
    if learned and subject.train:
        _show_training_images(replace(subject, samples=subject.train, part="train"), learned, display)
    return logits_NK


def _show_training_images(subject: Subject, metrics: Sequence[Metric], display: Display) -> None:
    done = 0
    with display.task("measuring training images") as advance:
        for index_C in torch.arange(len(subject.samples)).split(CHUNK):
            for batch in _batches(subject, index_C, perturbed=False, attacked=False):
                for metric in metrics:
                    metric.collect(batch)
                done += len(batch)
                advance(done, len(subject.samples))


def _batches(subject: Subject, index_C: Tensor, *, perturbed: bool, attacked: bool) -> Iterator[Batch]:
    if not len(index_C):  # a split of no images still has one piece
        return
    samples = tuple(subject.samples[number] for number in index_C.tolist())
    classifier, inputs, part_CQ4, object_C4 = subject.classifier, [], None, None
    for network in classifier.networks:
        decoded = decode_chunk(subject.root, samples, network.backbone.input_size)
        inputs.append(hold(decoded.pixels, samples, classifier.device))
        if subject.parts is not None and part_CQ4 is None:
            part_CQ4, object_C4 = subject.parts.shares(samples, decoded.views)
    for place_B in torch.arange(len(samples)).split(BATCH[classifier.device.type]):
        yield Batch(
            subject,
            index_C[place_B],
            [images.batch(place_B)[0] for images in inputs],
            _rows(part_CQ4, place_B, classifier.device),
            _rows(object_C4, place_B, classifier.device),
            perturbed=perturbed,
            attacked=attacked,
        )


def _rows(values_C: np.ndarray | None, place_B: Tensor, device: torch.device) -> Tensor | None:
    return None if values_C is None else torch.from_numpy(values_C[place_B.numpy()]).to(device)
