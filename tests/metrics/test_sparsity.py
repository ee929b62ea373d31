"""Sparsity: small cases counted by hand, and lines against those of the scoring sheet."""

from __future__ import annotations

import pytest
import torch
from helpers.metric_cases import case, spot
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from likethat.explaining.scoring import group_by_part
from likethat.metrics.sparsity import Sparsity, needed_for_most, negative_share, points_of_lines
from likethat.metrics.sweep import Evidence


def test_counts_of_a_prediction() -> None:
    points_BP = torch.tensor([[8.0, 1.0, -1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, -5.0, 0.0, 0.0]])
    assert needed_for_most(points_BP).tolist() == [2, 4, 1]
    weight_BP = torch.tensor([[1.0, 1.0, -1.0, 1.0]] * 3)
    assert negative_share(points_BP, weight_BP).tolist() == pytest.approx([0.1, 0.25, 0.0])
    maps = torch.stack([spot(0.1, 0.1) * value for value in (4.0, 2.0, 1.0)])[None]
    batch = case(maps, [0], [0, 0, 1], torch.tensor([[1.0, 0.0, -1.0], [0.0, 0.0, 1.0]]))
    metric = Sparsity(batch.subject)
    metric.collect(batch)
    zero, used, needed, lines, negative = metric.figures()
    values = [figure.value for figure in (zero, used, needed, lines, negative)]
    assert values == pytest.approx([0.5, 2, 2, 1, 0.2])


def evidence(box_BE4: Tensor, points_BE: Tensor, rest: float) -> Evidence:
    reading = case(torch.zeros(1, 1, 4, 4), [0], [0]).clean  # boxes are written down instead of read off its maps
    found = Evidence(reading, torch.zeros(points_BE.shape).long(), points_BE, points_BE > 0, points_BE.sum(1) + rest)
    found.__dict__["box_BE4"] = box_BE4
    return found


def slow_lines(boxes: list[tuple[float, ...]], points: list[float], classes: list[int]) -> list[float]:
    """The points of the scoring sheet's lines, class by class."""
    lines = []
    for name in set(classes):
        members = [number for number, other in enumerate(classes) if other == name]
        groups = group_by_part([boxes[number] for number in members])  # type: ignore[arg-type]
        lines += [sum(points[members[number]] for number in group) for group in groups]
    return sorted(lines, reverse=True)


@given(st.integers(1, 8), st.integers(0, 2**16), st.sampled_from([0.0, 0.5]))
def test_lines_are_those_of_the_scoring_sheet(count: int, seed: int, rest: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    corner_BE2 = torch.randint(0, 4, (3, count, 2), generator=generator) / 8
    size_BE2 = torch.randint(2, 5, (3, count, 2), generator=generator) / 8
    box_BE4 = torch.cat([corner_BE2, corner_BE2 + size_BE2], 2)
    points_BE = torch.rand(3, count, generator=generator).sort(1, descending=True).values
    class_BE = torch.randint(0, 2, (3, count), generator=generator)
    lines_BE = points_of_lines(evidence(box_BE4, points_BE, rest), class_BE)
    assert lines_BE[:, -1].tolist() == pytest.approx([rest] * 3, abs=1e-6)
    for lines_E, box_E4, points_E, class_E in zip(lines_BE, box_BE4, points_BE, class_BE, strict=True):
        slow = slow_lines([tuple(box) for box in box_E4.tolist()], points_E.tolist(), class_E.tolist())
        fast = sorted((value for value in lines_E[:-1].tolist() if value > 0), reverse=True)
        assert fast == pytest.approx(slow)


def test_lines_of_a_network_that_looks_at_two_places() -> None:
    here, there = spot(0.1, 0.1), spot(0.9, 0.9)
    maps = torch.stack([here * 4, here * 3, there * 2, there * 1])[None]
    batch = case(maps, [0], [0, 0, 0, 1], torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]))
    metric = Sparsity(batch.subject)
    metric.collect(batch)
    value_of = {figure.name: figure.value for figure in metric.figures()}
    assert value_of["prototypes for nine tenths of the points"] == 3
    assert value_of["lines for nine tenths of the points"] == 2, "7 of 10 points, then 2: nine tenths"
