"""How prototypes answer to a changed picture: similarity, box and prediction, before and after."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from likethat.metrics.figure import HIGHER, LOWER, About, MetricFigure
from likethat.metrics.regions import Reading, intersection_over_union
from likethat.metrics.sweep import Batch

LEADING = 3  # prototypes with most points that are looked at in every picture


@dataclass(frozen=True)
class Response:
    """By picture, means over its leading prototypes; NaN where no prototype gives points."""

    change_B: Tensor  # of the similarity, as a share of what it was
    overlap_B: Tensor  # intersection over union of the box with the one before, moved as the picture was
    kept_B: Tensor  # whether the prediction is the same
    prototype_S: Tensor  # every single prototype looked at, and its overlap
    overlap_S: Tensor


def respond(batch: Batch, after: Reading, move_23: Tensor | None = None) -> Response:
    """Compare the leading prototypes before and after; `move_23` takes a place in the picture before (in shares: x, y,
    1) to its place after."""
    evidence, leading = batch.evidence, min(LEADING, batch.evidence.prototype_BE.shape[1])
    counts_BL = evidence.counts_BE[:, :leading]
    image_S, rank_S = counts_BL.nonzero().unbind(1)
    prototype_S = evidence.prototype_BE[image_S, rank_S]
    before_S4 = evidence.box_BE4[image_S, rank_S]
    expected_S4 = before_S4 if move_23 is None else moved_boxes(before_S4, move_23.to(before_S4))
    overlap_S = intersection_over_union(after.boxes(image_S, prototype_S), expected_S4)
    similarity_S = batch.clean.score_BP[image_S, prototype_S]
    change_S = (after.score_BP[image_S, prototype_S] - similarity_S).abs() / similarity_S.abs().clamp(min=1e-6)
    kept_B = after.logits_BK.argmax(1) == batch.predicted_B
    count_B = counts_BL.sum(1)
    change_B, overlap_B = (_means(value_S, image_S, count_B).cpu() for value_S in (change_S, overlap_S))
    return Response(change_B, overlap_B, kept_B.cpu(), prototype_S.cpu(), overlap_S.cpu())


def _means(value_S: Tensor, image_S: Tensor, count_B: Tensor) -> Tensor:
    """Return the mean of each image; NaN for an image without values."""
    return value_S.new_zeros(len(count_B)).index_add_(0, image_S, value_S) / count_B


def moved_boxes(box_S4: Tensor, move_23: Tensor) -> Tensor:
    """Return the smallest upright boxes around the moved ones, as far as they are still in the picture."""
    x0, y0, x1, y1 = box_S4.unbind(1)
    corner_S34 = torch.stack(
        [torch.stack([x0, x1, x1, x0]), torch.stack([y0, y0, y1, y1]), torch.ones(4, len(x0)).to(x0)]
    )
    moved_2S4 = (move_23 @ corner_S34.flatten(1)).unflatten(1, (4, -1)).transpose(1, 2)
    return torch.cat([moved_2S4.amin(2).T, moved_2S4.amax(2).T], 1).clamp(0, 1)


@dataclass
class Responses:
    """All responses to one kind of change, perhaps of several sorts."""

    kind: str  # ends the figures' names
    group: str
    source: str
    seen: dict[str, list[Response]] = field(default_factory=dict)

    def add(self, sort: str, response: Response) -> None:
        self.seen.setdefault(sort, []).append(response)

    def figures(self, note: str) -> list[MetricFigure]:
        change = About(f"similarity change, {self.kind}", LOWER, self.group, self.source)
        overlap = About(f"box overlap, {self.kind}", HIGHER, self.group, self.source)
        kept = About(f"prediction kept, {self.kind}", HIGHER, self.group, self.source)
        if not self.seen:
            return [about.absent("nothing to measure it on") for about in (overlap, change, kept)]
        # Of one picture under several sorts of change, the mean: pictures are the independent draws.
        by_sort = {
            name: {sort: torch.cat([getattr(r, name) for r in found]).double() for sort, found in self.seen.items()}
            for name in ("change_B", "overlap_B", "kept_B")
        }
        value_N = {name: torch.stack(list(values.values())).mean(0) for name, values in by_sort.items()}
        sorts = ", ".join(f"{sort} {value_N_.nanmean():.0%}" for sort, value_N_ in by_sort["overlap_B"].items())
        return [
            overlap.mean(value_N["overlap_B"], f"{note}; {sorts}" if len(self.seen) > 1 else note),
            change.mean(value_N["change_B"], note),
            kept.proportion(value_N["kept_B"], note),
        ]

    def overlap_P(self, prototypes: int) -> Tensor:
        """Return the mean overlap of every prototype; NaN for those that never lead."""
        responses = [response for found in self.seen.values() for response in found]
        if not responses:
            return torch.full((prototypes,), torch.nan)
        prototype_S = torch.cat([response.prototype_S for response in responses])
        overlap_S = torch.cat([response.overlap_S for response in responses]).double()
        total_P = torch.zeros(prototypes, dtype=torch.double).index_add_(0, prototype_S, overlap_S)
        return total_P / prototype_S.bincount(minlength=prototypes)
