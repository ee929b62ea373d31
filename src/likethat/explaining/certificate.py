"""What the last projection can have done to predictions: the paper's theorem 2.1, and a tighter bound.

The projection moved every prototype from b to a. Both stand in the run, so what follows for an image can be computed
from its distances to the b alone, and checked against its distances to the a. All of it is done in float64 on the CPU.

Shapes as in `models.prototypes`; S are the patches of an image.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from likethat.data.dataset import Sample
from likethat.data.loaders import to_unit
from likethat.data.reading.workers import map_in_threads
from likethat.errors import UserError
from likethat.models.protopnet import ProtoPNet
from likethat.models.prototypes import EPSILON, SIMILARITIES, Similarity
from likethat.progress import Advance
from likethat.runs.classifier import Classifier, PreparedPicture

BATCH = 32
NUMBERS = 4_000_000  # in one tensor of distances, which bounds the memory
ROUNDING = 1e-6  # a lead no larger than this is left to rounding and certifies nothing


@dataclass(frozen=True)
class Move:
    """What the last projection did to the prototypes of one network, as the vectors they are compared as."""

    before_PD: Tensor
    after_PD: Tensor
    similarity: Similarity


@dataclass(frozen=True)
class Scores:
    """The scores of some images before and after the projection, and the range that follows from those before."""

    before_BP: Tensor
    after_BP: Tensor
    low_BP: Tensor
    high_BP: Tensor
    distance_BP: Tensor  # of the nearest patch before the projection
    kept_B: Tensor  # (A1): that patch is also the nearest after it, for every prototype


@dataclass(frozen=True)
class ClassVerdict:
    """An image under one last layer. Classes are numbers; `bound` is the least lead of `before` after projection."""

    before: int
    after: int
    bound: float

    @property
    def certified(self) -> bool:
        return self.bound > ROUNDING

    @property
    def refuted(self) -> bool:
        return self.certified and self.before != self.after


@dataclass(frozen=True)
class Theorem:
    """An image under theorem 2.1. `delta` and `delta_max` are None where no delta satisfies (A2)."""

    nearest_kept: bool  # (A1)
    delta: float | None  # of those that satisfy (A2), the one with the smallest delta_max
    delta_max: float | None  # how much a logit can change at most
    margin: float  # between the two largest logits before the projection
    correct: bool  # whether the largest of them is the image's class

    @property
    def covered(self) -> bool:
        return self.nearest_kept and self.delta is not None

    @property
    def certified(self) -> bool:
        return self.covered and self.correct and self.delta_max is not None and self.margin >= 2 * self.delta_max


@dataclass(frozen=True)
class ImageCertificate:
    path: str
    label: int
    run: ClassVerdict  # with the run's last layer
    a4: ClassVerdict  # with the theorem's: 1 to a prototype's own class, 0 to all others
    theorem: Theorem | None  # None where the theorem does not apply to the run

    @property
    def refuted(self) -> bool:
        """Return whether a certified prediction changed all the same: a defect, never seen in a sound certificate."""
        by_theorem = self.theorem is not None and self.theorem.certified and self.a4.before != self.a4.after
        return by_theorem or self.run.refuted or self.a4.refuted


@dataclass(frozen=True)
class Certificate:
    images: tuple[ImageCertificate, ...]
    reason: str  # why the theorem does not apply; empty where it does

    @property
    def refuted(self) -> tuple[ImageCertificate, ...]:
        return tuple(image for image in self.images if image.refuted)


def certify(
    classifier: Classifier, root: Path, samples: Sequence[Sample], advance: Advance | None = None
) -> Certificate:
    """Certify the predictions of image files under `root`; few of them are in memory at any time."""
    networks = classifier.networks
    moves = [move_of(network) for network in networks]
    own_KP = torch.cat([network.own_KP for network in networks], 1).cpu().double()
    weight_KP = classifier.weight_KP.cpu().double()
    reason = why_theorem_does_not_apply(networks)
    per_class = int(own_KP[0].sum())
    found: list[ImageCertificate] = []
    for start in range(0, len(samples), BATCH):
        chunk = samples[start : start + BATCH]
        pictures = list(map_in_threads(lambda sample: classifier.prepare(root / sample.path, sample.box), chunk))
        scores = scores_of(networks, moves, pictures)
        label_B = torch.tensor([sample.label for sample in chunk])
        theorems = [None] * len(chunk) if reason else apply_theorem(scores, moves[0], own_KP, label_B, per_class)
        rows = zip(chunk, judge(scores, weight_KP), judge(scores, own_KP), theorems, strict=True)
        found += [ImageCertificate(sample.path, sample.label, run, a4, theorem) for sample, run, a4, theorem in rows]
        if advance:
            advance(len(found), len(samples))
    return Certificate(tuple(found), reason)


@torch.no_grad()
def move_of(network: ProtoPNet) -> Move:
    layer = network.prototype_layer
    if not layer.unprojected_PDhw.any():
        raise UserError("The run does not hold its prototypes from before the projection; train it with likethat.")
    unprojected = copy.deepcopy(layer)
    unprojected.prototype_PDhw.copy_(layer.unprojected_PDhw)
    return Move(unprojected.vectors().cpu().double(), layer.vectors().cpu().double(), layer.similarity)


def why_theorem_does_not_apply(networks: Sequence[ProtoPNet]) -> str:
    if len(networks) > 1:
        return f"the run is a sum of {len(networks)} networks, and the theorem is about one"
    layer = networks[0].prototype_layer
    if layer.similarity != SIMILARITIES["log"]:
        name = next(name for name, similarity in SIMILARITIES.items() if similarity == layer.similarity)
        return f"its bound is about the log similarity of L2 distances, and this run has the {name} similarity"
    count_K = layer.class_P.bincount(minlength=networks[0].num_classes)
    if count_K.min() != count_K.max():
        return f"(A3) does not hold: classes have {int(count_K.min())} to {int(count_K.max())} prototypes"
    return ""


@torch.no_grad()
def scores_of(networks: Sequence[ProtoPNet], moves: Sequence[Move], pictures: Sequence[PreparedPicture]) -> Scores:
    """Return scores side by side over all members: logits are one product of all scores and all weights."""
    found = []
    for member, (network, move) in enumerate(zip(networks, moves, strict=True)):
        device = next(network.parameters()).device
        x_B3HW = to_unit(torch.stack([picture.pixels[member] for picture in pictures]).to(device))
        patch_BDHW = network.prototype_layer.patches(network.latent(x_B3HW))
        patch_BSD = patch_BDHW.flatten(2).transpose(1, 2).cpu().double()
        at_once = max(1, NUMBERS // (patch_BSD.shape[1] * len(move.before_PD)))
        parts = [scores_around_projection(patch_bSD, move) for patch_bSD in patch_BSD.split(at_once)]
        found.append({name: torch.cat([getattr(part, name) for part in parts]) for name in Scores.__annotations__})
    joined = {name: torch.cat([part[name] for part in found], 1) for name in found[0] if name != "kept_B"}
    return Scores(**joined, kept_B=torch.stack([part["kept_B"] for part in found]).all(0))


def scores_around_projection(patch_BSD: Tensor, move: Move) -> Scores:
    """Return scores before and after projection, and the range that those before leave to those after."""
    if move.similarity.angular:
        before_BSP = 2 - 2 * patch_BSD @ move.before_PD.T
        after_BSP = 2 - 2 * patch_BSD @ move.after_PD.T
        least_BP, most_BP = angular_range(patch_BSD, move)
    else:
        before_BSP, after_BSP = (
            torch.cdist(patch_BSD.flatten(0, 1), vector_PD).square().unflatten(0, patch_BSD.shape[:2])
            for vector_PD in (move.before_PD, move.after_PD)
        )
        least_BP, most_BP = euclidean_range(before_BSP.amin(1), move)
    distance_BP, patch_BP = before_BSP.min(1)
    after_BP = after_BSP.amin(1)
    there_BP = after_BSP.gather(1, patch_BP[:, None])[:, 0]
    kept_B = (there_BP <= after_BP * (1 + 1e-12)).all(1)  # equal patches may differ by rounding
    of = move.similarity.of_distance
    return Scores(of(distance_BP), of(after_BP), of(most_BP), of(least_BP), distance_BP, kept_B)


def euclidean_range(distance_BP: Tensor, move: Move) -> tuple[Tensor, Tensor]:
    """Return the least and the most that the squared distance of the nearest patch can be after the projection.

    By the triangle inequality no patch comes nearer or goes farther than its prototype moved.
    """
    near_BP, moved_P = distance_BP.sqrt(), (move.after_PD - move.before_PD).norm(dim=1)
    return (near_BP - moved_P).clamp(min=0).square(), (near_BP + moved_P).square()


def angular_range(patch_BSD: Tensor, move: Move) -> tuple[Tensor, Tensor]:
    """Return the same range for 2 - 2 <z, a>, given |z| and <z, b> of every patch: the tightest that follows from them.

    With a = t b + c, c orthogonal to b, <z, a> = t <z, b> + <z, c>, and <z, c> is at most |c| times the length of
    what z has orthogonal to b.
    """
    square_P = move.before_PD.square().sum(1).clamp(min=1e-30)
    along_P = (move.after_PD * move.before_PD).sum(1) / square_P
    aside_P = (move.after_PD - along_P[:, None] * move.before_PD).norm(dim=1)
    product_BSP = patch_BSD @ move.before_PD.T
    length_BS1 = patch_BSD.square().sum(2, keepdim=True)
    spread_BSP = (length_BS1 - product_BSP.square() / square_P).clamp(min=0).sqrt() * aside_P
    middle_BSP = along_P * product_BSP
    return 2 - 2 * (middle_BSP + spread_BSP).amax(1), 2 - 2 * (middle_BSP - spread_BSP).amax(1)


def judge(scores: Scores, weight_KP: Tensor) -> list[ClassVerdict]:
    before_B = (scores.before_BP @ weight_KP.T).argmax(1)
    after_B = (scores.after_BP @ weight_KP.T).argmax(1)
    bound_B = least_lead(scores.low_BP, scores.high_BP, weight_KP, before_B)
    rows = zip(before_B.tolist(), after_B.tolist(), bound_B.tolist(), strict=True)
    return [ClassVerdict(before, after, bound) for before, after, bound in rows]


def least_lead(low_BP: Tensor, high_BP: Tensor, weight_KP: Tensor, class_B: Tensor) -> Tensor:
    """Return the least that logit c - logit k can be for any other class k, c the image's class in `class_B`.

    The difference is bounded as one sum, sum_j (w_cj - w_kj) s_j with s_j in [low_j, high_j]: a prototype that
    speaks for both classes alike cannot set them apart, however far it moved.
    """
    middle_BP, half_BP = (low_BP + high_BP) / 2, (high_BP - low_BP) / 2
    least_B = torch.full_like(low_BP[:, 0], math.inf)
    for label in class_B.unique().tolist():
        here_B = class_B == label
        gap_KP = weight_KP[label] - weight_KP
        lead_bK = middle_BP[here_B] @ gap_KP.T - half_BP[here_B] @ gap_KP.abs().T
        lead_bK[:, label] = math.inf
        least_B[here_B] = lead_bK.amin(1)
    return least_B


def apply_theorem(scores: Scores, move: Move, own_KP: Tensor, label_B: Tensor, per_class: int) -> list[Theorem]:
    moved_P = (move.after_PD - move.before_PD).norm(dim=1)
    lowest_B, highest_B = feasible_delta(scores.distance_BP.sqrt(), moved_P, own_KP[label_B].bool())
    logits_BK = scores.before_BP @ own_KP.T
    top_B2 = logits_BK.topk(2, dim=1).values
    rows = zip(
        scores.kept_B.tolist(),
        [best_delta(*pair) for pair in zip(lowest_B.tolist(), highest_B.tolist(), strict=True)],
        (top_B2[:, 0] - top_B2[:, 1]).tolist(),
        (logits_BK.argmax(1) == label_B).tolist(),
        strict=True,
    )
    return [
        Theorem(kept, delta, None if delta is None else delta_max(delta, per_class), margin, correct)
        for kept, delta, margin, correct in rows
    ]


def feasible_delta(near_BP: Tensor, moved_P: Tensor, own_BP: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest delta that satisfy (A2) for an image; there is none if they cross.

    Every condition is monotone in delta, so it can be solved for it. With t = |a - b| / |z - b| for the correct
    class and t = (|a - b| + sqrt(eps)) / |z - b| for the others:

        t <= sqrt(1 + delta) - 1        <=>  delta >= (1 + t)^2 - 1         all prototypes
        t <= 1 - 1 / sqrt(2 - delta)    <=>  delta <= 2 - 1 / (1 - t)^2     incorrect classes, where t < 1
        |z - b| <= sqrt(1 - delta)      <=>  delta <= 1 - |z - b|^2         correct class

    There are incorrect classes, whose t is positive, so the first number is above 0 and the second below 1.
    """
    reach_BP = moved_P + math.sqrt(EPSILON) * (~own_BP)
    share_BP = torch.where(reach_BP == 0, 0.0, reach_BP / near_BP)  # unmoved: any delta, even on the patch itself
    lowest_BP = (1 + share_BP).square() - 1
    others_BP = torch.where(share_BP < 1, 2 - (1 - share_BP).square().reciprocal(), -math.inf)
    highest_BP = torch.where(own_BP, 1 - near_BP.square(), others_BP)
    return lowest_BP.amax(1), highest_BP.amin(1)


def best_delta(lowest: float, highest: float) -> float | None:
    """Return the delta with the smallest delta_max: that grows up to delta = 1/2 and falls after it, so it is the end
    farther from there."""
    if not lowest <= highest:
        return None
    return lowest if abs(lowest - 0.5) >= abs(highest - 0.5) else highest


def delta_max(delta: float, per_class: int) -> float:
    return per_class * math.log((1 + delta) * (2 - delta))
