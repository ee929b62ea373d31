"""Does the similarity hold when everything outside the box changes?

Definition (Sacha et al. 2024, "Interpretability benchmark for evaluating spatial misalignment of prototypical parts
explanations", AAAI): the prototype of the picture's own class with the largest similarity is attacked outside its box
(grown by 10/224 of the side) by 20 steps of projected gradient descent that lower its similarity (at most 0.1 a
pixel, 0.01 a step, in units of ImageNet's standard deviation). Activation change (PAC): the share of the similarity
that is lost. Location change (PLC): one less the overlap of the tenth of the pixels that are most active, before and
after. Rank change (PRC): how many more prototypes of other classes are above it. 0 is best for all.
Similarity kept (ours): everything outside the box becomes another test picture; similarity at the same place, as a
share of what it was, for the prototype with most points. 1 is best.

Limits: the attack finds a worst case, that no real picture may show. A pasted box has edges that are new to the
network. The similarity that is minus a distance has no shares, and gives no figures here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.metrics.figure import HIGHER, LOWER, About, MetricFigure
from likethat.metrics.gradients import by_member, similarity_gradient
from likethat.metrics.regions import Reading, box_masks
from likethat.metrics.sweep import IMAGENET_STD, Batch, Metric, Subject
from likethat.models.protopnet import ProtoPNet
from likethat.runtime import seed_for

MARGIN = 10 / 224
BOUND, STEP, STEPS = 0.1, 0.01, 20
ACTIVE = 0.1  # share of the pixels
GROUP, SACHA = "inside and outside the box", "Sacha et al. 2024"
PAC = About("activation change under attack (PAC)", LOWER, GROUP, SACHA)
PLC = About("location change under attack (PLC)", LOWER, GROUP, SACHA)
PRC = About("rank change under attack (PRC)", LOWER, GROUP, SACHA, unit="prototypes")
KEPT = About("similarity kept in another picture", HIGHER, GROUP, "this project")


def attack(
    network: ProtoPNet, x_B3HW: Tensor, prototype_B: Tensor, free_B1HW: Tensor, generator: torch.Generator
) -> Tensor:
    """Change the picture's free pixels, each by at most BOUND, so that the prototype's similarity is least."""
    bound_311 = BOUND * torch.tensor(IMAGENET_STD, device=x_B3HW.device)[:, None, None]
    step_311 = bound_311 * STEP / BOUND
    start_B3HW = torch.rand(x_B3HW.shape, generator=generator, device=x_B3HW.device) * 2 - 1
    change_B3HW = start_B3HW * bound_311 * free_B1HW
    for _ in range(STEPS):
        gradient_B3HW = similarity_gradient(network, x_B3HW + change_B3HW, prototype_B)
        change_B3HW = change_B3HW - step_311 * gradient_B3HW.sign() * free_B1HW
        change_B3HW = torch.minimum(torch.maximum(change_B3HW, -bound_311), bound_311)
    return x_B3HW + change_B3HW


def active_pixels(map_BHW: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """Return a mask of the tenth of the pixels where the upsampled (bilinear) map is largest."""
    pixel_Bn = F.interpolate(map_BHW[:, None], size_hw, mode="bilinear", align_corners=False).flatten(1)
    count = max(1, round(ACTIVE * pixel_Bn.shape[1]))
    return pixel_Bn >= pixel_Bn.topk(count, dim=1).values[:, -1:]


def location_change(before_BHW: Tensor, after_BHW: Tensor, size_hw: tuple[int, int]) -> Tensor:
    before_Bn, after_Bn = active_pixels(before_BHW, size_hw), active_pixels(after_BHW, size_hw)
    return 1 - (before_Bn & after_Bn).sum(1) / (before_Bn | after_Bn).sum(1)


def others_above(score_BP: Tensor, prototype_B: Tensor, class_P: Tensor) -> Tensor:
    """Count the prototypes of other classes that are more similar to the picture."""
    own_B1 = score_BP.gather(1, prototype_B[:, None])
    return ((score_BP > own_B1) & (class_P != class_P[prototype_B][:, None])).sum(1)


def positive_share(part_B: Tensor, whole_B: Tensor) -> Tensor:
    return torch.where(whole_B > 0, part_B / whole_B, torch.nan)


class Misalignment(Metric):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.pac, self.plc, self.prc, self.kept = ([torch.zeros(0)] for _ in range(4))

    def collect(self, batch: Batch) -> None:
        if batch.perturbed and len(batch) > 1:
            self.kept.append(similarity_kept(batch).cpu())
        if batch.attacked:
            self._attack(batch)

    def _attack(self, batch: Batch) -> None:
        class_P, networks = self.subject.class_P, self.subject.classifier.networks
        own_BP = batch.label_B[:, None] == class_P
        prototype_B = batch.clean.score_BP.masked_fill(~own_BP, -torch.inf).argmax(1)
        everyone_B = torch.arange(len(batch), device=batch.device)
        box_B4 = batch.clean.boxes(everyone_B, prototype_B)
        box_B4 = box_B4 + torch.tensor([-MARGIN, -MARGIN, MARGIN, MARGIN], device=batch.device)
        generator = torch.Generator(batch.device).manual_seed(seed_for("attack", int(batch.index_B[0])))
        x = list(batch.x)

        def change(member: int, mine: Tensor, prototype_b: Tensor) -> None:
            network = networks[member]
            free_b1HW = ~box_masks(box_B4[mine][:, None], network.backbone.input_size)
            attacked_b3HW = attack(network, x[member][mine], prototype_b, free_b1HW, generator)
            x[member] = x[member].index_copy(0, mine, attacked_b3HW)

        by_member(networks, prototype_B, change)
        after = batch.read(x)
        before_B, after_B = (reading.score_BP.gather(1, prototype_B[:, None])[:, 0] for reading in (batch.clean, after))
        self.pac.append((1 - positive_share(after_B, before_B)).cpu())
        rank_B = others_above(after.score_BP, prototype_B, class_P)
        self.prc.append((rank_B - others_above(batch.clean.score_BP, prototype_B, class_P)).float().cpu())
        maps = zip(batch.clean.maps(everyone_B, prototype_B), after.maps(everyone_B, prototype_B), strict=True)
        for (network, _, before_bHW), (_, _, after_bHW) in maps:
            self.plc.append(location_change(before_bHW, after_bHW, network.backbone.input_size).cpu())

    def figures(self) -> list[MetricFigure]:
        attacked = self.subject.sample_note(self.subject.attacked)
        return [
            PAC.mean(torch.cat(self.pac), attacked),
            PLC.mean(torch.cat(self.plc), attacked),
            PRC.mean(torch.cat(self.prc), attacked),
            KEPT.mean(torch.cat(self.kept), self.subject.sample_note(self.subject.perturbed)),
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
