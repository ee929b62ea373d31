"""Does a prototype's similarity come from inside its box?

Definition (ours): of the prototype that gives the prediction most points, the gradient of its similarity with respect
to the picture; energy is its square, summed over colours. The share of the energy that lies inside the prototype's
box, against the share of the picture that the box covers: a network whose cells see everything alike scores the
latter.

Limits: gradients tell what a small change does, not what the patch was made of, and saturated parts have none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from likethat.metrics.figure import HIGHER, About, Figure
from likethat.metrics.gradients import by_member, similarity_gradient
from likethat.metrics.regions import areas, box_masks
from likethat.metrics.sweep import Batch, Metric, Subject

ABOUT = About("gradient energy inside the box", HIGHER, "inside and outside the box", "this project")


def energy_inside(gradient_B3HW: Tensor, box_B4: Tensor) -> Tensor:
    """The share of each picture's energy; NaN where there is no gradient at all."""
    energy_BHW = gradient_B3HW.square().sum(1)
    inside_BHW = box_masks(box_B4[:, None], (energy_BHW.shape[1], energy_BHW.shape[2]))[:, 0]
    return (energy_BHW * inside_BHW).sum((1, 2)) / energy_BHW.sum((1, 2))


class ReceptiveField(Metric):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.share, self.area = [torch.zeros(0)], [torch.zeros(0)]

    def collect(self, batch: Batch) -> None:
        if not batch.perturbed:
            return
        counts_B = batch.evidence.counts_BE[:, 0]
        box_B4 = batch.evidence.box_BE4[:, 0]

        def measure(member: int, mine: Tensor, prototype_b: Tensor) -> None:
            network = self.subject.classifier.networks[member]
            gradient_b3HW = similarity_gradient(network, batch.x[member][mine], prototype_b)
            share_b = energy_inside(gradient_b3HW, box_B4[mine])
            self.share.append(torch.where(counts_B[mine], share_b, torch.nan).cpu())
            self.area.append(areas(box_B4[mine]).cpu())

        by_member(self.subject.classifier.networks, batch.evidence.prototype_BE[:, 0], measure)

    def figures(self) -> list[Figure]:
        share_N, area_N = torch.cat(self.share), torch.cat(self.area)
        note = self.subject.sample_note(self.subject.perturbed)
        return [ABOUT.mean(share_N, f"{note}; boxes cover {area_N.mean():.1%} of the picture")]
