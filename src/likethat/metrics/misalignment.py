"""Does the similarity hold when everything outside the box changes?

Definition (Sacha et al. 2024, "Interpretability benchmark for evaluating spatial misalignment of prototypical parts
explanations", AAAI, and its code): the most similar prototype of all is attacked outside its box (grown by 10 px at
224 px, 10/224 of other sides; the last row and column are always outside) by 40 steps of projected gradient descent
that lower its similarity: 0.01 a step and at most 0.4 a pixel on the normalised picture, from a random start within
that bound. Activation change (PAC): the share of the similarity that is lost. Location change (PLC): one less the
intersection over union of the pixels above the 0.9 quantile of the map (bilinear), before and after. Rank change (PRC):
how many more prototypes of other classes than the picture's are above it. 0 is best for all.

Random start: the same three after the random start alone, without a step. The authors' code gives the attack library
one number, the similarity, as the logits of a single class. Cross entropy over one class is 0, and so is its gradient:
read literally, that code changes pictures at random and its figures stand beside these.

Small attack (ours): the best prototype of the picture's own class, at most 0.1 a pixel in 20 steps of 0.01, which no
person sees; the share of the similarity that is lost.
Similarity kept (ours): everything outside the box becomes another picture; similarity at the same place, as a share of
what it was, for the prototype with most points. 1 is best.

Limits: the attack finds a worst case, that no real picture may show. A pasted box has edges that are new to the
network. The similarity that is minus a distance has no shares, and gives no figures here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.inference.attack import lower_similarity
from likethat.metrics.figure import HIGHER, LOWER, About, MetricFigure
from likethat.metrics.gradients import by_member
from likethat.metrics.regions import Reading, box_masks
from likethat.metrics.sweep import IMAGENET_STD, Batch, Metric, Subject
from likethat.models.protopnet import ProtoPNet
from likethat.runtime import seed_for

MARGIN_PIXELS = 10  # at a side of 224
MARGIN = MARGIN_PIXELS / 224
STEP = 0.01  # in units of ImageNet's standard deviation, as bounds are
QUANTILE = 0.9  # of a map: what is above it is its active region
GROUP, SACHA = "inside and outside the box", "Sacha et al. 2024"
PAC = About("activation change under attack (PAC)", LOWER, GROUP, SACHA)
PLC = About("location change under attack (PLC)", LOWER, GROUP, SACHA)
PRC = About("rank change under attack (PRC)", LOWER, GROUP, SACHA, unit="prototypes")
START_PAC = About("PAC of the random start alone", LOWER, GROUP, SACHA)
START_PLC = About("PLC of the random start alone", LOWER, GROUP, SACHA)
START_PRC = About("PRC of the random start alone", LOWER, GROUP, SACHA, unit="prototypes")
SMALL_ATTACK = About("similarity lost to a small attack", LOWER, GROUP, "this project")
KEPT = About("similarity kept in another picture", HIGHER, GROUP, "this project")


@dataclass(frozen=True)
class Strength:
    """How far an attack may go."""

    bound: float  # of a pixel's change
    steps: int
    rim: bool  # whether the last row and column may change inside the box, too, as the authors' code has it

    def note(self) -> str:
        return f"{self.steps} steps of {STEP}, at most {self.bound} on the normalised picture"


PUBLISHED, SMALL = Strength(0.4, 40, rim=True), Strength(0.1, 20, rim=False)


def attack(
    network: ProtoPNet,
    x_B3HW: Tensor,
    prototype_B: Tensor,
    free_B1HW: Tensor,
    generator: torch.Generator,
    strength: Strength = PUBLISHED,
) -> tuple[Tensor, Tensor]:
    """Change the free pixels of the pictures, first at random, then so that the prototype's similarity is least;
    return the pictures after either."""
    std_311 = torch.tensor(IMAGENET_STD, device=x_B3HW.device)[:, None, None]
    bound_311, step_311 = strength.bound * std_311, STEP * std_311
    start_B3HW = torch.rand(x_B3HW.shape, generator=generator, device=x_B3HW.device) * 2 - 1
    first_B3HW = start_B3HW * bound_311 * free_B1HW

    def similarity_of(changed_B3HW: Tensor) -> Tensor:
        return network(changed_B3HW).score_BP.gather(1, prototype_B[:, None])

    where = (x_B3HW, first_B3HW, free_B1HW)
    last_B3HW = lower_similarity(similarity_of, *where, bound=bound_311, step=step_311, steps=strength.steps)
    return x_B3HW + first_B3HW, x_B3HW + last_B3HW


def free_pixels(box_B4: Tensor, size_hw: tuple[int, int], *, rim: bool) -> Tensor:
    """B x 1 x H x W: True outside the boxes, grown by MARGIN, and with `rim` in the last row and column."""
    grown_B4 = box_B4 + torch.tensor([-MARGIN, -MARGIN, MARGIN, MARGIN], device=box_B4.device)
    free_B1HW = ~box_masks(grown_B4[:, None], size_hw)
    if rim:
        free_B1HW[..., -1, :] = free_B1HW[..., :, -1] = True
    return free_B1HW


def active_pixels(map_BHW: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """Return where, True at the pixels where the upsampled (bilinear) map is above its quantile, the linear one."""
    pixel_Bn = F.interpolate(map_BHW[:, None], size_hw, mode="bilinear", align_corners=False).flatten(1)
    place = QUANTILE * (pixel_Bn.shape[1] - 1)
    top_Bk = pixel_Bn.topk(pixel_Bn.shape[1] - floor(place), dim=1).values
    above_B, below_B = top_Bk[:, -2], top_Bk[:, -1]  # the quantile lies between these
    return pixel_Bn > torch.lerp(below_B, above_B, place - floor(place))[:, None]


def location_change(before_BHW: Tensor, after_BHW: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """Return one less the overlap of the active regions; 0 where neither map has an active region."""
    before_Bn, after_Bn = active_pixels(before_BHW, size_hw), active_pixels(after_BHW, size_hw)
    either_B = (before_Bn | after_Bn).sum(1)
    return torch.where(either_B > 0, 1 - (before_Bn & after_Bn).sum(1) / either_B.clamp(min=1), 0.0)


def others_above(score_BP: Tensor, prototype_B: Tensor, class_P: Tensor, label_B: Tensor) -> Tensor:
    """Count the prototypes of other classes than the picture's that are more similar to it than this one."""
    own_B1 = score_BP.gather(1, prototype_B[:, None])
    return ((score_BP > own_B1) & (class_P != label_B[:, None])).sum(1)


def positive_share(part_B: Tensor, whole_B: Tensor) -> Tensor:
    return torch.where(whole_B > 0, part_B / whole_B, torch.nan)


@dataclass(frozen=True)
class Changes:
    """What a change of the pictures outside the boxes did to one prototype of each."""

    pac_B: Tensor
    plc_B: Tensor
    prc_B: Tensor


def changes(batch: Batch, after: Reading, prototype_B: Tensor) -> Changes:
    class_P, everyone_B = batch.subject.class_P, torch.arange(len(batch), device=batch.device)
    before_B, after_B = (reading.score_BP.gather(1, prototype_B[:, None])[:, 0] for reading in (batch.clean, after))
    rank_2B = [others_above(found.score_BP, prototype_B, class_P, batch.label_B) for found in (after, batch.clean)]
    plc_B = before_B.new_zeros(len(batch))
    both = zip(batch.clean.maps(everyone_B, prototype_B), after.maps(everyone_B, prototype_B), strict=True)
    for (network, mine, before_bHW), (_, _, after_bHW) in both:
        plc_B[mine] = location_change(before_bHW, after_bHW, network.backbone.input_size)
    pac_B = 1 - positive_share(after_B, before_B)
    return Changes(pac_B.cpu(), plc_B.cpu(), (rank_2B[0] - rank_2B[1]).float().cpu())


def attacked_pictures(batch: Batch, prototype_B: Tensor, strength: Strength) -> tuple[list[Tensor], list[Tensor]]:
    """Return the pictures after the random start and after the attack; only the network that has the prototype sees
    them changed."""
    networks = batch.subject.classifier.networks
    box_B4 = batch.clean.boxes(torch.arange(len(batch), device=batch.device), prototype_B)
    generator = torch.Generator(batch.device).manual_seed(seed_for("attack", int(batch.index_B[0])))
    first, last = list(batch.x), list(batch.x)

    def change(member: int, mine: Tensor, prototype_b: Tensor) -> None:
        network = networks[member]
        free_b1HW = free_pixels(box_B4[mine], network.backbone.input_size, rim=strength.rim)
        found = attack(network, batch.x[member][mine], prototype_b, free_b1HW, generator, strength)
        for x, changed_b3HW in zip((first, last), found, strict=True):
            x[member] = x[member].index_copy(0, mine, changed_b3HW)

    by_member(networks, prototype_B, change)
    return first, last


class Misalignment(Metric):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.started: list[Changes] = []
        self.attacked: list[Changes] = []
        self.small, self.kept = [torch.zeros(0)], [torch.zeros(0)]

    def collect(self, batch: Batch) -> None:
        if batch.perturbed and len(batch) > 1:
            self.kept.append(similarity_kept(batch).cpu())
        if not batch.attacked:
            return
        top_B = batch.clean.score_BP.argmax(1)
        first, last = attacked_pictures(batch, top_B, PUBLISHED)
        self.started.append(changes(batch, batch.read(first), top_B))
        self.attacked.append(changes(batch, batch.read(last), top_B))
        own_BP = batch.label_B[:, None] == self.subject.class_P
        best_B = batch.clean.score_BP.masked_fill(~own_BP, -torch.inf).argmax(1)
        _, little = attacked_pictures(batch, best_B, SMALL)
        self.small.append(changes(batch, batch.read(little), best_B).pac_B)

    def figures(self) -> list[MetricFigure]:
        subject = self.subject
        images = f"{subject.sample_note(subject.attacked)}, {subject.view_note}"
        where = f"outside the box grown by {subject.pixels_note(MARGIN_PIXELS)}"
        most = f"{images}; the most similar prototype, {where}, {PUBLISHED.note()}"
        start = f"{images}; the most similar prototype, {where}, uniform noise of at most {PUBLISHED.bound}"
        small = f"{images}; the best prototype of the own class, {where}, {SMALL.note()}"
        region = f"regions above the {QUANTILE} quantile"

        def values(seen: list[Changes], name: str) -> Tensor:
            return torch.cat([torch.zeros(0), *(getattr(found, name) for found in seen)])

        return [
            PAC.mean(values(self.attacked, "pac_B"), most),
            PLC.mean(values(self.attacked, "plc_B"), f"{most}; {region}"),
            PRC.mean(values(self.attacked, "prc_B"), most),
            START_PAC.mean(values(self.started, "pac_B"), start),
            START_PLC.mean(values(self.started, "plc_B"), f"{start}; {region}"),
            START_PRC.mean(values(self.started, "prc_B"), start),
            SMALL_ATTACK.mean(torch.cat(self.small), small),
            KEPT.mean(torch.cat(self.kept), subject.sample_note(subject.perturbed)),
        ]


def similarity_kept(batch: Batch) -> Tensor:
    """Return similarities with the box of the prototype with most points pasted into the batch's next picture."""
    evidence = batch.evidence
    box_B14, prototype_B = evidence.box_BE4[:, :1], evidence.prototype_BE[:, 0]
    pasted = []
    for x_B3HW in batch.x:
        inside_B1HW = box_masks(box_B14, (x_B3HW.shape[2], x_B3HW.shape[3]))
        pasted.append(torch.where(inside_B1HW, x_B3HW, x_B3HW.roll(1, 0)))
    before_B, after_B = at_the_same_place(batch.clean, batch.read(pasted), prototype_B)
    return torch.where(evidence.counts_BE[:, 0], positive_share(after_B, before_B), torch.nan)


def at_the_same_place(before: Reading, after: Reading, prototype_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return similarities at the place where the prototype was most active before."""
    everyone_B = torch.arange(len(prototype_B), device=prototype_B.device)
    value_2B = before.logits_BK.new_zeros(2, len(prototype_B))
    both = zip(before.maps(everyone_B, prototype_B), after.maps(everyone_B, prototype_B), strict=True)
    for (_, mine, before_bHW), (_, _, after_bHW) in both:
        value_2B[0, mine], place_b = before_bHW.flatten(1).max(1)
        value_2B[1, mine] = after_bHW.flatten(1).gather(1, place_b[:, None])[:, 0]
    return value_2B[0], value_2B[1]
