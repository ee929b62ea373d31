"""Proof that every prototype is the latent patch of the training image it names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from likethat.data.decode import ImageError, read_image, to_input
from likethat.data.files import read_file
from likethat.data.loaders import to_unit
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Advance
from likethat.runs.classifier import Classifier, Prototype

TOLERANCE = 1e-4
BATCH = 32


@dataclass(frozen=True)
class Failure:
    prototype: int
    path: str
    reason: str


PROVEN, FAILED, NOT_PROVEN = "proven", "failed", "not proven"


@dataclass(frozen=True)
class Finding:
    """What was looked at besides the patches, what came of it, and why."""

    what: str
    result: str  # proven, failed or not proven
    why: str


@dataclass(frozen=True)
class Verification:
    prototypes: int
    images: int
    max_error: float  # largest absolute difference of any coordinate
    failures: tuple[Failure, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failures and all(finding.result != FAILED for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


def verify(classifier: Classifier, roots: Sequence[Path], advance: Advance | None = None) -> Verification:
    """Recomputes the source patch of every prototype from the image file and compares it number by number.

    `roots` has the data folder of each network.
    """
    failures: list[Failure] = []
    worst, done, images = 0.0, 0, 0
    for member, model in enumerate(classifier.networks):
        own = [prototype for prototype in classifier.prototypes if prototype.member == member]
        by_image: dict[tuple[str, object], list[tuple[int, Prototype]]] = {}
        for number, prototype in enumerate(own):  # its number within the member's prototype layer
            by_image.setdefault((prototype.path, prototype.crop_to), []).append((number, prototype))
        images += len(by_image)
        groups = list(by_image.values())
        for start in range(0, len(groups), BATCH):
            error, found = _verify_images(model, groups[start : start + BATCH], roots[member])
            worst = max(worst, error)
            failures += found
            done += sum(len(group) for group in groups[start : start + BATCH])
            if advance:
                advance(done, len(classifier.prototypes))
    return Verification(len(classifier.prototypes), images, worst, tuple(failures))


@torch.no_grad()
def _verify_images(
    model: ProtoPNet, groups: list[list[tuple[int, Prototype]]], root: Path
) -> tuple[float, list[Failure]]:
    """The largest error, and what fails, among the prototypes of a few images."""
    layer, device = model.prototype_layer, next(model.parameters()).device
    pixels, readable, failures = [], [], []
    for group in groups:
        first = group[0][1]
        try:
            data = read_file(root / first.path)
            changed = hashlib.sha256(data).hexdigest() != first.sha256
            reason = "the image file has changed since training" if changed else ""
            image = read_image(data, name=first.path)
        except (OSError, ImageError) as error:
            reason = f"the image file cannot be read ({getattr(error, 'strerror', None) or error})"
        if reason:
            failures += [Failure(prototype.id, first.path, reason) for _, prototype in group]
            continue
        input_HW3, _ = to_input(image, first.crop_to, model.backbone.input_size)
        pixels.append(torch.from_numpy(input_HW3).permute(2, 0, 1))
        readable.append(group)
    if not pixels:
        return 0.0, failures
    patch_BDHW = layer.patches(model.latent(to_unit(torch.stack(pixels).to(device))))
    vector_PD = layer.vectors()
    worst = 0.0
    for number_in_batch, group in enumerate(readable):
        for number, prototype in group:
            patch_D = patch_BDHW[number_in_batch, :, prototype.row, prototype.column]
            off = float((patch_D - vector_PD[number]).abs().max())
            worst = max(worst, off)
            if not off <= TOLERANCE:
                failures.append(Failure(prototype.id, prototype.path, f"differs by up to {off:.2e}"))
    return worst, failures
