"""Do the boxes with most points matter more to the prediction than boxes elsewhere?

Definition (after Petsiuk et al. 2018, "RISE: randomized input sampling for explanation of black-box models", BMVC):
the boxes of the first 1, 2, 3, 5 and 10 prototypes that give the predicted class points, most points first, are
blurred (deletion), or are alone left sharp (insertion). The figure is the mean probability of the predicted class
over these steps: low is good for deletion, high for insertion. The same is done with boxes of the same sizes at
random places; the difference says what the boxes are worth.

Limits: overlapping boxes hide less than as many separate random ones, so the comparison is against the evidence. Blur
is new to a network that never saw it; another filling gives other numbers.
"""

from __future__ import annotations

import torch

from likethat.metrics.figure import HIGHER, LOWER, About, MetricFigure
from likethat.metrics.reveal import Revealing

GROUP, SOURCE = "evidence", "after Petsiuk et al. 2018"
DELETION = About("deletion", LOWER, GROUP, SOURCE)
DELETION_GAIN = About("deletion, below random boxes by", HIGHER, GROUP, SOURCE)
INSERTION = About("insertion", HIGHER, GROUP, SOURCE)
INSERTION_GAIN = About("insertion, above random boxes by", HIGHER, GROUP, SOURCE)


class Deletion(Revealing):
    def figures(self) -> list[MetricFigure]:
        before_N = torch.cat([torch.zeros(0), *(seen.before_B for seen in self.seen)])
        hidden_N, random_hidden_N, shown_N, random_shown_N = (
            torch.cat([torch.zeros(0), *(getattr(seen, name).probability_LB.mean(0) for seen in self.seen)])
            for name in ("hidden", "random_hidden", "shown", "random_shown")
        )
        note = self.subject.sample_note(self.subject.perturbed)
        return [
            DELETION.mean(hidden_N, f"{note}; {before_N.mean():.1%} with the whole picture"),
            DELETION_GAIN.mean(random_hidden_N - hidden_N, note),
            INSERTION.mean(shown_N, note),
            INSERTION_GAIN.mean(shown_N - random_shown_N, note),
        ]
