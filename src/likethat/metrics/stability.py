"""Does a prototype stay on its part when the picture gets a little noise?

Definition (Huang et al. 2023, "Evaluation and improvement of interpretability for self-explainable part-prototype
networks", ICCV, and its code): the parts in the square around a prototype's most active pixel (see `consistency`) are
found with and without noise (normal, standard deviation 0.2, cut at 0.25, on the normalised picture: in units of
ImageNet's standard deviation of each colour). The score is the share of pictures of the prototype's class for which
both are the same parts, averaged over the prototypes.

Limits: a prototype that never lands on any part is perfectly stable, so read it together with consistency. One draw
of noise a picture, the same every time. Pictures without a visible part are left out, which the authors count as
stable; CUB has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from likethat.metrics.figure import HIGHER, About, MetricFigure
from likethat.metrics.part_hits import NO_PARTS, own_parts, parts_in_region, square_note
from likethat.metrics.sweep import MOST_NOISE, NOISE, Batch, Metric, Subject

ABOUT = About("stability", HIGHER, "parts", "Huang et al. 2023")


class Stability(Metric):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.same_P = torch.zeros(len(subject.class_P), dtype=torch.long)
        self.count_P = torch.zeros_like(self.same_P)

    def collect(self, batch: Batch) -> None:
        if batch.part_BQ4 is None:
            return
        image_S, prototype_S = batch.own_pairs
        known_S = (~batch.part_BQ4[..., 0].isnan()).any(1)[image_S]
        noisy_SQ = parts_in_region(batch.noisy, image_S, prototype_S, batch.part_BQ4)
        same_S = (batch.once("own parts", own_parts) == noisy_SQ).all(1) & known_S
        self.same_P += prototype_S[same_S].cpu().bincount(minlength=len(self.same_P))
        self.count_P += prototype_S[known_S].cpu().bincount(minlength=len(self.count_P))

    def share_P(self) -> Tensor:
        return torch.where(self.count_P > 0, self.same_P.double() / self.count_P, torch.nan)

    def figures(self) -> list[MetricFigure]:
        if self.subject.parts is None:
            return [ABOUT.absent(NO_PARTS)]
        images = f"{len(self.subject.samples)} {self.subject.kind} {square_note(self.subject)}"
        noise = f"normal noise of {NOISE} (cut at {MOST_NOISE}) on the normalised picture"
        return [ABOUT.mean(self.share_P(), f"{int((self.count_P > 0).sum())} prototypes; {images}; {noise}")]
