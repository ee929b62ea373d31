"""Does a prototype's similarity come from inside its box, and from around its middle?

Definition (ours): of the prototype that gives the prediction most points, the gradient of its similarity with respect
to the picture; energy is its square, summed over colours. The share of the energy that lies inside the prototype's box,
against the share of the picture that the box covers: a network whose cells see everything alike scores the latter. The
offset is that of the energy's centre of gravity from the middle of the box, to the right and downwards, in sides of the
picture, over boxes whose middle is in the middle half of the picture. 0 is best: the padding of strided convolutions
moves what a cell sees (a ResNet's by half a cell up and left), while its box is drawn as if it had not.

Limits: gradients tell what a small change does, not what the patch was made of, and saturated parts have none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from likethat.metrics.figure import HIGHER, NEITHER, About, MetricFigure
from likethat.metrics.gradients import by_member, similarity_gradient
from likethat.metrics.regions import areas, box_masks, centres
from likethat.metrics.sweep import Batch, Metric, Subject

GROUP = "inside and outside the box"
ABOUT = About("gradient energy inside the box", HIGHER, GROUP, "this project")
OFFSETS = tuple(
    About(f"gradient centre {where} the middle", NEITHER, GROUP, "this project", unit="sides of the picture")
    for where in ("right of", "below")
)


def energy_inside(gradient_B3HW: Tensor, box_B4: Tensor) -> Tensor:
    """Return the share of each picture's gradient energy inside the box; NaN where there is no gradient at all."""
    energy_BHW = gradient_B3HW.square().sum(1)
    inside_BHW = box_masks(box_B4[:, None], (energy_BHW.shape[1], energy_BHW.shape[2]))[:, 0]
    return (energy_BHW * inside_BHW).sum((1, 2)) / energy_BHW.sum((1, 2))


def energy_centres(gradient_B3HW: Tensor) -> Tensor:
    """Return centres of gravity (x, y), B x 2, in shares of the picture."""
    energy_BHW = gradient_B3HW.square().sum(1)
    weight_BHW = energy_BHW / energy_BHW.sum((1, 2), keepdim=True)
    height, width = energy_BHW.shape[1:]
    x_W = (torch.arange(width, device=energy_BHW.device) + 0.5) / width
    y_H = (torch.arange(height, device=energy_BHW.device) + 0.5) / height
    return torch.stack([(weight_BHW.sum(1) * x_W).sum(1), (weight_BHW.sum(2) * y_H).sum(1)], 1)


class ReceptiveField(Metric):
    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.share, self.area, self.offset = [torch.zeros(0)], [torch.zeros(0)], [torch.zeros(0, 2)]

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
            middle_b2 = centres(box_B4[mine])
            # At the rim a network can only look inwards.
            counts_b = counts_B[mine] & ((middle_b2 - 0.5).abs() <= 0.25).all(1)
            self.offset.append((energy_centres(gradient_b3HW) - middle_b2)[counts_b].cpu())

        by_member(self.subject.classifier.networks, batch.evidence.prototype_BE[:, 0], measure)

    def figures(self) -> list[MetricFigure]:
        share_N, area_N = torch.cat(self.share), torch.cat(self.area)
        note = self.subject.sample_note(self.subject.perturbed)
        offset_n2 = torch.cat(self.offset)
        return [
            ABOUT.mean(share_N, f"{note}; boxes cover {area_N.mean():.1%} of the picture"),
            *(
                about.mean(offset_n, f"{len(offset_n)} images with the box in the middle; 0 is best")
                for about, offset_n in zip(OFFSETS, offset_n2.unbind(1), strict=True)
            ),
        ]
