"""Hand-made cases for metrics: a real network, whose answer to a batch is written down by the test."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from likethat.classifier import Classifier, Prototype
from likethat.config import resolve
from likethat.data.dataset import Sample
from likethat.data.parts import PartTable
from likethat.metrics.regions import Reading
from likethat.metrics.sweep import Batch, Subject
from likethat.models.protopnet import Output, ProtoPNet, create_protopnet

SIDE = 64  # pixels of the input
MAP = 4  # cells of the map along a side


def case(
    similarity_BPHW: Tensor,
    label_B: Sequence[int],
    class_of_prototype: Sequence[int],
    weight_KP: Tensor | None = None,
    part_BQ4: Tensor | None = None,
    parts: PartTable | None = None,
    object_B4: Tensor | None = None,
) -> Batch:
    """A batch for which the network gives these similarity maps. The 'linear' similarity is minus the distance, so
    any map can be written down. Pictures are random."""
    classes = max(*class_of_prototype, *label_B) + 1
    network = tiny_network(tuple(class_of_prototype), classes)
    if weight_KP is not None:
        network.last_layer.weight.data = weight_KP.float()
    if parts is None and part_BQ4 is not None:
        parts = PartTable(tuple(f"part {number}" for number in range(part_BQ4.shape[1])), {}, {})
    box = (0.0, 0.0, 1.0, 1.0)
    prototypes = [
        Prototype(p, label, f"class {label}", "a.png", "", 0, 0, box, box, None, 0.0, "", "", box)
        for p, label in enumerate(class_of_prototype)
    ]
    names = [f"class {label}" for label in range(classes)]
    classifier = Classifier(Path("nowhere"), names, [network], prototypes)
    samples = tuple(Sample(f"{number}.png", label) for number, label in enumerate(label_B))
    subject = Subject(classifier, Path("nowhere"), samples, parts)
    pictures = torch.rand(len(label_B), 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    index_B = torch.arange(len(label_B))
    batch = Batch(subject, index_B, [pictures], part_BQ4, object_B4, perturbed=True, attacked=True)
    batch.__dict__["clean"] = reading(network, similarity_BPHW)
    return batch


def reading(network: ProtoPNet, similarity_BPHW: Tensor) -> Reading:
    score_BP = similarity_BPHW.flatten(2).amax(2)
    output = Output(
        score_BP @ network.last_layer.weight.detach().T, score_BP, -score_BP, -similarity_BPHW, lambda d: -d
    )
    return Reading([network], [output])


def noisy(batch: Batch, similarity_BPHW: Tensor) -> Batch:
    """The same batch, with this answer under noise."""
    batch.__dict__["noisy"] = reading(batch.subject.classifier.networks[0], similarity_BPHW)
    return batch


@cache
def tiny_network(class_of_prototype: tuple[int, ...], classes: int) -> ProtoPNet:
    counts = np.bincount(class_of_prototype, minlength=classes).tolist()
    config = resolve(
        backbone="test_resnet", weights="none", latent_width=8, input_size=(SIDE, SIDE), similarity="linear"
    )
    torch.manual_seed(0)
    return create_protopnet(config.model, counts).eval()


def spot(x: float, y: float) -> Tensor:
    """A map whose peak lies in the middle of the cell that holds this point (in shares of the picture)."""
    map_HW = torch.zeros(MAP, MAP)
    map_HW[min(int(y * MAP), MAP - 1), min(int(x * MAP), MAP - 1)] = 1.0
    return map_HW


def point(x: float, y: float) -> list[float]:
    """A part known by a point."""
    return [x, y, x, y]
