"""Does the evidence that tells two classes apart lie on the part in which they differ?

Definition (ours, after the pointing game of Zhang et al. 2018, "Top-down neural attention by excitation backprop",
IJCV): for a test picture of a class that differs from another class in one part only, each prototype gives separating
points: similarity times (connection to the own class less connection to the other). Pointing game: the share of
pictures in which the most active pixel of the prototype with most separating points lies on the part's box or within
15/224 of the side of it. Separating points on the part: the share of all positive ones (of the ten largest) whose
prototypes point there. Distance: from that pixel to the box, in sides of the picture.

Limits: needs data that says in which part classes differ, as the embedded birds do. A prototype with no positive
separating points misses. A cell of the map is larger than most parts, so a pixel may point beside the part that was
seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from likethat.metrics.figure import HIGHER, LOWER, About, MetricFigure
from likethat.metrics.regions import areas, distance_to_box
from likethat.metrics.sweep import EVIDENCE, Batch, Metric, Subject

TOLERANCE = 15 / 224
NO_PAIRS = "the data names no classes that differ in one part only"
POINTING = About("pointing game", HIGHER, "parts", "after Zhang et al. 2018")
POINTS = About("separating points on the part", HIGHER, "parts", "this project")
DISTANCE = About("distance from the decisive part", LOWER, "parts", "this project", unit="sides of the picture")


def separating_points(score_SP: Tensor, weight_KP: Tensor, own_S: Tensor, other_S: Tensor) -> Tensor:
    return score_SP * (weight_KP[own_S] - weight_KP[other_S])


class Decisive(Metric):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        number = {name: label for label, name in enumerate(subject.classifier.classes)}
        pairs = [] if subject.parts is None else subject.parts.pairs
        both_ways = [(a, b, part) for first, second, part in pairs for a, b in ((first, second), (second, first))]
        triples = [(number[a], number[b], part) for a, b, part in both_ways if a in number and b in number]
        self.pair_M3 = torch.tensor(triples, dtype=torch.long).reshape(-1, 3)
        self.hit, self.share, self.distance, self.chance = ([torch.zeros(0)] for _ in range(4))

    def collect(self, batch: Batch) -> None:
        if batch.part_BQ4 is None or not len(self.pair_M3):
            return
        pair_M3 = self.pair_M3.to(batch.device)
        image_S, pair_S = (batch.label_B[:, None] == pair_M3[:, 0]).nonzero().unbind(1)
        box_S4 = batch.part_BQ4[image_S, pair_M3[pair_S, 2]]
        shown_S = ~box_S4[:, 0].isnan()
        image_S, pair_S, box_S4 = image_S[shown_S], pair_S[shown_S], box_S4[shown_S]
        own_S, other_S, _ = pair_M3[pair_S].unbind(1)
        points_SP = separating_points(batch.clean.score_BP[image_S], self.subject.weight_KP, own_S, other_S)
        points_SE, prototype_SE = points_SP.topk(min(EVIDENCE, points_SP.shape[1]), dim=1)
        most = points_SE.shape[1]
        peak_R2 = batch.clean.peaks(image_S.repeat_interleave(most), prototype_SE.flatten())
        away_SE = distance_to_box(peak_R2, box_S4.repeat_interleave(most, 0)).unflatten(0, points_SE.shape)
        counts_SE = points_SE > 0
        on_SE = (away_SE <= TOLERANCE) & counts_SE
        gained_SE = points_SE.clamp(min=0)
        self.hit.append(on_SE[:, 0].cpu().float())
        self.share.append(((gained_SE * on_SE).sum(1) / gained_SE.sum(1).clamp(min=1e-12)).cpu())
        self.distance.append(torch.where(counts_SE[:, 0], away_SE[:, 0], torch.nan).cpu())
        grown_S4 = box_S4 + torch.tensor([-TOLERANCE, -TOLERANCE, TOLERANCE, TOLERANCE], device=batch.device)
        self.chance.append(areas(grown_S4.clamp(0, 1)).cpu())

    def figures(self) -> list[MetricFigure]:
        hit_S, share_S, distance_S, chance_S = map(torch.cat, (self.hit, self.share, self.distance, self.chance))
        if not len(hit_S):
            return [about.absent(NO_PAIRS) for about in (POINTING, POINTS, DISTANCE)]
        pairs, chance = len(self.pair_M3) // 2, float(chance_S.mean())
        note = f"{len(hit_S)} images of {pairs} pairs of classes"
        return [
            POINTING.proportion(hit_S, f"{note}; a random pixel scores {chance:.1%}"),
            POINTS.mean(share_S, note),
            DISTANCE.mean(distance_S, note),
        ]
