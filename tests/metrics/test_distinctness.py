"""Distinctness, against counting pixels one by one."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from helpers.metric_cases import SIDE, case, spot
from torch import Tensor

from likethat.explaining.boxes import activation_boxes
from likethat.metrics.distinctness import Distinctness, covered_shares, makes_up_most, pair_overlaps


def pixels(box: tuple[float, ...]) -> set[tuple[int, int]]:
    x0, y0, x1, y1 = map(int, box)
    return {(x, y) for x in range(x0, x1) for y in range(y0, y1)}


def slowly(similarity_PHW: Tensor, weight_P: Tensor) -> tuple[float | None, float | None, int]:
    """Overlap, cover and number of boxes of one picture."""
    points = {p: float(similarity_PHW[p].max() * weight_P[p]) for p in range(len(weight_P))}
    given = sorted((p for p in points if points[p] > 0), key=lambda p: -points[p])
    total, gathered, chosen = sum(points[p] for p in given), 0.0, []
    for p in given[:10]:
        if gathered >= 0.9 * total:
            break
        chosen.append(p)
        gathered += points[p]
    sets = [pixels(activation_boxes(similarity_PHW[p][None], (SIDE, SIDE))[0]) for p in chosen]
    pairs = [len(a & b) / len(a | b) for a, b in combinations(sets, 2)]
    overlap = sum(pairs) / len(pairs) if pairs else None
    return overlap, len(set().union(*sets)) / SIDE**2 if sets else None, len(chosen)


def test_overlap_and_cover_of_random_maps_are_those_of_counted_pixels() -> None:
    generator = torch.Generator().manual_seed(1)
    maps_BPHW = torch.randn(6, 14, 4, 4, generator=generator)
    maps_BPHW[1, 3] = 1000  # one box makes up nine tenths of the points
    maps_BPHW[2] = 0  # nothing gives points
    weight_KP = torch.rand(2, 14, generator=generator) + 0.1
    weight_KP[0, 5] = -2
    batch = case(maps_BPHW, [0] * 6, [0] * 7 + [1] * 7, weight_KP)
    metric = Distinctness(batch.subject)
    metric.collect(batch)
    overlap_B, cover_B, boxes_B = map(torch.cat, (metric.overlap, metric.cover, metric.boxes))
    seen = [slowly(maps_BPHW[b], weight_KP[int(batch.predicted_B[b])]) for b in range(6)]
    assert [number for _, _, number in seen] == boxes_B.tolist()
    assert seen[1][2] == 1
    assert seen[2][2] == 0
    assert max(number for _, _, number in seen) == 10, "more are never shown"
    for number, (overlap, cover, _) in enumerate(seen):
        assert overlap_B[number].isnan() if overlap is None else float(overlap_B[number]) == pytest.approx(overlap)
        assert cover_B[number].isnan() if cover is None else float(cover_B[number]) == pytest.approx(cover)
    found = {figure.name: figure.value for figure in metric.figures()}
    overlaps = [overlap for overlap, _, _ in seen if overlap is not None]
    assert found["overlap of evidence boxes (distinctness)"] == pytest.approx(sum(overlaps) / len(overlaps))


def test_the_same_box_overlaps_fully_and_boxes_apart_do_not() -> None:
    same = torch.stack([spot(0.1, 0.1)] * 3)
    apart = torch.stack([spot(0.1, 0.1), spot(0.9, 0.1), spot(0.1, 0.9)])
    batch = case(torch.stack([same, apart]), [0, 0], [0, 0, 0], torch.ones(1, 3))
    metric = Distinctness(batch.subject)
    metric.collect(batch)
    assert torch.cat(metric.overlap).tolist() == pytest.approx([1.0, 0.0])
    cover = torch.cat(metric.cover).tolist()
    assert cover[1] == pytest.approx(3 * cover[0], rel=0.05)


def test_nine_tenths_are_reached_with_the_fewest() -> None:
    points_BE = torch.tensor([[9.0, 0.5, 0.5], [5.0, 4.0, 1.0], [4.0, 3.0, 3.0], [1.0, 0.0, -1.0]])
    most_BE = makes_up_most(points_BE, points_BE.clamp(min=0).sum(1))
    assert most_BE.sum(1).tolist() == [1, 2, 3, 1]


def test_boxes_that_do_not_count_change_nothing() -> None:
    box_BE4 = torch.tensor([[[0.0, 0.0, 0.5, 0.5], [0.25, 0.0, 0.75, 0.5], [0.0, 0.0, 1.0, 1.0]]])
    counts_BE = torch.tensor([[True, True, False]])
    assert pair_overlaps(box_BE4, counts_BE).tolist() == pytest.approx([1 / 3])
    assert covered_shares(box_BE4, counts_BE, (8, 8)).tolist() == pytest.approx([0.375])
