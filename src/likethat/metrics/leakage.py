"""Does the prediction rest on the boxed parts, or on what the explanation does not show?

Definition (ours): of every picture only the boxes of the (at most ten) prototypes that give the predicted class most
points are left sharp, and the rest is blurred: the share of pictures whose prediction survives. And the other way
round, with these boxes blurred and the rest sharp: a prediction that survives there came from outside the boxes.

Limits: ten boxes may cover much of the picture; the note says how much, and how boxes of the same sizes at random
places do. A cell of the map sees beyond its box, and blur is new to the network.
"""

from __future__ import annotations

import torch
from torch import Tensor

from likethat.metrics.figure import HIGHER, LOWER, About, MetricFigure
from likethat.metrics.reveal import Revealing

ALONE = About("prediction survives on the boxes alone", HIGHER, "evidence", "this project")
WITHOUT = About("prediction survives without the boxes", LOWER, "evidence", "this project")


class Leakage(Revealing):
    def figures(self) -> list[MetricFigure]:
        def last(name: str, value: str) -> Tensor:
            """Return the values at the last step, with all boxes."""
            values = [getattr(getattr(seen, name), value)[-1] for seen in self.seen]
            return torch.cat([torch.zeros(0), *values]).double()

        figures = []
        for about, name in ((ALONE, "shown"), (WITHOUT, "hidden")):
            area, random_area = last(name, "area_LB").mean(), last(f"random_{name}", "area_LB").mean()
            note = (
                f"{self.subject.sample_note(self.subject.perturbed)}; boxes cover {area:.0%} of the picture. Random "
                f"boxes of the same sizes: {last(f'random_{name}', 'kept_LB').mean():.1%}, covering {random_area:.0%}"
            )
            figures.append(about.proportion(last(name, "kept_LB"), note))
        return figures
