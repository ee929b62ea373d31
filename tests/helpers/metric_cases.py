"""Hand-made cases for metrics: a real network, whose answer to a batch is written down by the test."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from likethat.config.presets import resolve
from likethat.data.dataset import Sample
from likethat.data.parts import PartTable
from likethat.metrics.regions import Reading
from likethat.metrics.sweep import Batch, Subject
from likethat.models.protopnet import Output, ProtoPNet, create_protopnet
from likethat.models.prototypes import DistanceMaps
from likethat.runs.classifier import Classifier, Prototype

SIDE = 128  # pixels of the input
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
    """Return a batch for which the network gives these similarity maps. The 'linear' similarity is minus the distance,
    so any map can be written down. Pictures are random."""
    classes = max(*class_of_prototype, *label_B) + 1
    network = tiny_network(tuple(class_of_prototype), classes)
    if weight_KP is not None:
        network.last_layer.weight.data = weight_KP.float()
    if parts is None and part_BQ4 is not None:
        parts = PartTable(tuple(f"part {number}" for number in range(part_BQ4.shape[1])), {}, {})
    subject = make_subject(network, class_of_prototype, label_B, parts)
    pictures = torch.rand(len(label_B), 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    index_B = torch.arange(len(label_B))
    batch = Batch(subject, index_B, [pictures], part_BQ4, object_B4, perturbed=True, attacked=True)
    batch.__dict__["clean"] = reading(network, similarity_BPHW)
    return batch


def make_subject(
    network: ProtoPNet, class_of_prototype: Sequence[int], label_B: Sequence[int], parts: PartTable | None
) -> Subject:
    box = (0.0, 0.0, 1.0, 1.0)
    prototypes = [
        Prototype(p, label, f"class {label}", "a.png", "", p, 0, box, box, None, 0.0, "", "", box)
        for p, label in enumerate(class_of_prototype)
    ]
    names = [f"class {label}" for label in range(network.num_classes)]
    classifier = Classifier(Path("nowhere"), names, [network], prototypes)
    samples = tuple(Sample(f"{number}.png", label) for number, label in enumerate(label_B))
    return Subject(classifier, Path("nowhere"), samples, parts)


def reading(network: ProtoPNet, similarity_BPHW: Tensor) -> Reading:
    score_BP = similarity_BPHW.flatten(2).amax(2)
    maps = DistanceMaps(-similarity_BPHW, torch.zeros(score_BP.shape[1]), floor=False)
    logits_BK = score_BP @ network.last_layer.weight.detach().T
    output = Output(logits_BK, score_BP, -score_BP, maps, lambda d: -d)
    return Reading([network], [output])


def noisy(batch: Batch, similarity_BPHW: Tensor) -> Batch:
    """Return the same batch, with this answer under noise."""
    batch.__dict__["noisy"] = reading(batch.subject.classifier.networks[0], similarity_BPHW)
    return batch


@cache
def tiny_network(class_of_prototype: tuple[int, ...], classes: int) -> ProtoPNet:
    counts = np.bincount(class_of_prototype, minlength=classes).tolist()
    config = resolve(
        backbone="test_resnet",
        weights="none",
        fine_map=False,
        latent_width=8,
        input_size=(SIDE, SIDE),
        similarity="linear",
        box_margin=0.0,
    )
    torch.manual_seed(0)
    return create_protopnet(config.model, counts).eval()


def spot(x: float, y: float) -> Tensor:
    """Return a map whose peak lies in the middle of the cell that holds this point (in shares of the picture)."""
    map_HW = torch.zeros(MAP, MAP)
    map_HW[min(int(y * MAP), MAP - 1), min(int(x * MAP), MAP - 1)] = 1.0
    return map_HW


def point(x: float, y: float) -> list[float]:
    """Return a part known by a point."""
    return [x, y, x, y]


class Local(nn.Module):
    """A backbone that sees nothing beyond a cell: the mean colour of each of MAP x MAP cells."""

    name, input_size, map_size, channels, windows = "local", (SIDE, SIDE), (MAP, MAP), 3, None

    def forward(self, x_B3HW: Tensor) -> Tensor:
        return F.avg_pool2d(x_B3HW, SIDE // MAP)


class Everywhere(Local):
    """A backbone every cell of which sees the whole picture."""

    name = "everywhere"

    def forward(self, x_B3HW: Tensor) -> Tensor:
        return super().forward(x_B3HW) * 0.2 + 0.8 * x_B3HW.mean((2, 3), keepdim=True)


def colour_network(
    backbone: Local, colour_P3: Sequence[Sequence[float]], class_of_prototype: Sequence[int], weight_KP: Tensor
) -> ProtoPNet:
    """Return a ProtoPNet whose prototypes are colours."""
    counts = np.bincount(class_of_prototype, minlength=len(weight_KP)).tolist()
    network = ProtoPNet(backbone, resolve(latent_width=3, similarity="log", box_margin=0.0).model, counts)  # type: ignore[arg-type]
    network.add_on = nn.Sequential()
    network.prototype_layer.prototype_PDhw.data = torch.tensor(colour_P3)[:, :, None, None]
    network.last_layer.weight.data = weight_KP.float()
    return network.eval()


def picture_batch(network: ProtoPNet, x_B3HW: Tensor, label_B: Sequence[int]) -> Batch:
    class_P = network.prototype_layer.class_P.tolist()
    subject = make_subject(network, class_P, label_B, None)
    return Batch(subject, torch.arange(len(x_B3HW)), [x_B3HW], None, None, perturbed=True, attacked=True)
