"""Does a prototype land on the same part in all pictures of its class?

Definition (Huang et al. 2023, "Evaluation and improvement of interpretability for self-explainable part-prototype
networks", ICCV, and its code): in every measured picture of the prototype's class, the map is upsampled (bicubic) to
the network's input, and a part belongs to the prototype if it lies within 36 px (at 224 px; 36/224 of other sides) of
the most active pixel, along both axes, both counted in whole pixels, rim included. For each part, the share of the
pictures showing it in which it does. A prototype is consistent if one part's share is at least 0.8; the score is the
share of consistent prototypes, of all classes and whatever their connections. The authors' pictures are CUB's test
pictures, cropped to the box and squashed to 224x224.

Limits: the square is so large that it often holds several parts, and neighbouring parts count alike. Left and right
are different parts here, as in the authors' code. A model whose prototypes all look at one part is perfectly
consistent, so read it together with part coverage. Prototypes of classes without annotated test pictures are left
out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from likethat.metrics.figure import HIGHER, About, MetricFigure
from likethat.metrics.part_hits import NO_PARTS, PartHits, square_note

THRESHOLD = 0.8
ABOUT = About("consistency", HIGHER, "parts", "Huang et al. 2023")


def best_share(hit_PQ: Tensor, visible_PQ: Tensor) -> Tensor:
    """Return the share of each prototype's most frequent part; NaN where it was never seen with a visible part."""
    share_PQ = hit_PQ.double() / visible_PQ.clamp(min=1)
    seen_P = visible_PQ.sum(1) > 0
    return torch.where(seen_P, share_PQ.amax(1), torch.nan)


class Consistency(PartHits):
    def figures(self) -> list[MetricFigure]:
        if self.subject.parts is None:
            return [ABOUT.absent(NO_PARTS)]
        share_P = best_share(self.hit_PQ, self.visible_PQ)
        share_p = share_P[~share_P.isnan()]
        images = f"{len(self.subject.samples)} {self.subject.kind} {square_note(self.subject)}"
        note = (
            f"{len(share_p)} prototypes, mean share {share_p.mean():.2f}; {images}, in {THRESHOLD} of a class's images"
        )
        return [ABOUT.proportion(share_p >= THRESHOLD, note)]

    def by_prototype(self) -> Mapping[str, Tensor]:
        return {} if self.subject.parts is None else {"consistency": best_share(self.hit_PQ, self.visible_PQ)}
