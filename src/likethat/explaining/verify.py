"""Proof that every prototype is the latent patch of the training image it names; and, for networks that see windows,
that similarities depend on their boxes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from likethat.data.decode import ImageError, read_image, to_input
from likethat.data.loaders import to_unit
from likethat.data.reading.pages import digest_data, read_page
from likethat.data.reading.values import Range
from likethat.explaining.boxes import match_boxes
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Advance
from likethat.runs.classifier import Classifier, Prototype

TOLERANCE = 1e-4
BATCH = 32
PICTURES, PROTOTYPES = 8, 16  # whose boxes are proven, and compared in each of them, at most
MOST_CHANGE = 1e-5  # of a similarity; on one device the same numbers in the same places give the same bits


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
class BoxProof:
    """What was compared, and the largest change of a similarity."""

    pictures: int
    prototypes: int
    max_change: float


@dataclass(frozen=True)
class Verification:
    prototypes: int
    images: int
    max_error: float  # largest absolute difference of any coordinate
    failures: tuple[Failure, ...]
    boxes: BoxProof | None = None  # of networks that see windows
    findings: tuple[Finding, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failures and all(finding.result != FAILED for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


def verify(classifier: Classifier, roots: Sequence[Path], advance: Advance | None = None) -> Verification:
    """Recompute the source patch of every prototype from the image file and compare it number by number.

    `roots` has the data folder of each network. Of networks that see windows, a sample of pictures also proves that
    nothing outside the boxes counts.
    """
    failures: list[Failure] = []
    proofs: list[BoxProof] = []
    worst, done, images = 0.0, 0, 0
    for member, model in enumerate(classifier.networks):
        own = [prototype for prototype in classifier.prototypes if prototype.member == member]
        by_image: dict[tuple[str, object], list[tuple[int, Prototype]]] = {}
        for number, prototype in enumerate(own):  # its number within the member's prototype layer
            by_image.setdefault((prototype.path, prototype.crop_to), []).append((number, prototype))
        images += len(by_image)
        groups = list(by_image.values())
        for start in range(0, len(groups), BATCH):
            part = groups[start : start + BATCH]
            error, found = _verify_images(model, part, roots[member], classifier.value_range)
            worst = max(worst, error)
            failures += found
            done += sum(len(group) for group in part)
            if advance:
                advance(done, len(classifier.prototypes))
        if model.backbone.windows is not None:
            step = -(-len(groups) // PICTURES)
            sources = [group[0][1] for group in groups[::step]]
            proof, found = prove_boxes(model, sources, own, roots[member], classifier.value_range)
            proofs.append(proof)
            failures += found
    boxes = BoxProof(
        sum(proof.pictures for proof in proofs),
        sum(proof.prototypes for proof in proofs),
        max((proof.max_change for proof in proofs), default=0.0),
    )
    return Verification(len(classifier.prototypes), images, worst, tuple(failures), boxes if proofs else None)


def prove_boxes(
    model: ProtoPNet,
    sources: Sequence[Prototype],
    own: Sequence[Prototype],
    root: Path,
    value_range: Range | None = None,
) -> tuple[BoxProof, list[Failure]]:
    """Replace everything outside the boxes of some of the network's `own` prototypes, in the training pictures of
    `sources`, by other pictures: similarities must not change."""
    device = next(model.parameters()).device
    pictures = [
        (source, read)
        for source in sources
        if isinstance(read := _read(root, source, model.backbone.input_size, value_range), Tensor)
    ]
    if not pictures:  # which is told already
        return BoxProof(0, 0, 0.0), []
    failures, compared, worst = [], set(), 0.0
    x_N3HW = to_unit(torch.stack([pixels for _, pixels in pictures]).to(device))
    for number, prototype_p in enumerate(sample_prototypes(model, len(pictures))):
        change_p = changes_by_outside(model, x_N3HW, number, prototype_p).tolist()
        for p, change in zip(prototype_p.tolist(), change_p, strict=True):
            compared.add(p)
            worst = max(worst, change)
            if not change <= MOST_CHANGE:
                reason = f"its similarity changes by {change:.2e} with what lies outside its box"
                failures.append(Failure(own[p].id, pictures[number][0].path, reason))
    return BoxProof(len(pictures), len(compared), worst), failures


def _read(root: Path, source: Prototype, size_hw: tuple[int, int], value_range: Range | None) -> Tensor | str:
    """Return what the network saw of a prototype's training picture, or why it cannot be known."""
    try:
        data, page = read_page(root / source.path)
        if digest_data(data, page) != source.sha256:
            return "the image file has changed since training"
        image = read_image(data, name=source.path, value_range=value_range, page=page)
    except (OSError, ImageError) as error:
        return f"the image file cannot be read ({getattr(error, 'strerror', None) or error})"
    return torch.from_numpy(to_input(image, source.crop_to, size_hw)[0]).permute(2, 0, 1)


@torch.no_grad()
def _verify_images(
    model: ProtoPNet, groups: list[list[tuple[int, Prototype]]], root: Path, value_range: Range | None
) -> tuple[float, list[Failure]]:
    """Return the largest error, and what fails, among the prototypes of a few images."""
    layer, device = model.prototype_layer, next(model.parameters()).device
    pixels, readable, failures = [], [], []
    for group in groups:
        read = _read(root, group[0][1], model.backbone.input_size, value_range)
        if isinstance(read, str):
            failures += [Failure(prototype.id, prototype.path, read) for _, prototype in group]
            continue
        pixels.append(read)
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


def sample_prototypes(model: ProtoPNet, pictures: int) -> list[Tensor]:
    """Prototypes for each picture, spread over all of them."""
    count = len(model.prototype_layer.class_P)
    spread = torch.linspace(0, count - 1, pictures * PROTOTYPES).round().long()
    return [spread[number::pictures].unique() for number in range(pictures)]


@torch.no_grad()
def changes_by_outside(model: ProtoPNet, x_N3HW: Tensor, number: int, prototype_p: Tensor) -> Tensor:
    """Return how much the similarity of each of these prototypes to its patch of one picture changes when everything
    outside its box is replaced by pixels of the other pictures."""
    count = len(prototype_p)
    # As often as it will be changed: a batch of another shape may be rounded otherwise.
    x_p3HW = x_N3HW[number].expand(count, -1, -1, -1)
    before_pHW = _similarities(model, x_p3HW, prototype_p)
    inside_p1HW = torch.zeros_like(x_p3HW[:, :1], dtype=torch.bool)
    for own_1HW, (x0, y0, x1, y1) in zip(inside_p1HW, match_boxes(model, before_pHW), strict=True):
        own_1HW[:, int(y0) : int(y1), int(x0) : int(x1)] = True
    # Mirrored, so that even a single picture is another one.
    other_p = (number + 1 + torch.arange(count) % max(1, len(x_N3HW) - 1)) % len(x_N3HW)
    after_pHW = _similarities(model, torch.where(inside_p1HW, x_p3HW, x_N3HW[other_p].flip(3)), prototype_p)
    before_p, patch_p = before_pHW.flatten(1).max(1)
    return (after_pHW.flatten(1).gather(1, patch_p[:, None])[:, 0] - before_p).abs()


def _similarities(model: ProtoPNet, x_p3HW: Tensor, prototype_p: Tensor) -> Tensor:
    """Return the map of one prototype in each picture."""
    output = model(x_p3HW)
    everyone_p = torch.arange(len(prototype_p), device=x_p3HW.device)
    return output.of_distance(output.distance_BPHW[everyone_p, prototype_p.to(x_p3HW.device)])
