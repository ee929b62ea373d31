"""Which boxes show the same part: counted cell by cell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from likethat.data.decode import Box
from likethat.explaining.scoring import SAME_PART, group_by_part, overlap

BOX = st.tuples(*[st.integers(0, 8)] * 4).map(lambda box: (box[0], box[1], box[0] + box[2] + 1, box[1] + box[3] + 1))


def cells(box: tuple[int, int, int, int]) -> set[tuple[int, int]]:
    return {(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])}


@given(BOX, BOX)
def test_overlap_counts_cells(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> None:
    assert overlap(a, b) == pytest.approx(len(cells(a) & cells(b)) / len(cells(a) | cells(b)))


@given(st.lists(BOX, max_size=9))
def test_each_box_joins_the_first_group_it_lies_on(boxes: list[Box]) -> None:
    groups = group_by_part(boxes)
    assert sorted(number for group in groups for number in group) == list(range(len(boxes)))
    firsts = [group[0] for group in groups]
    assert firsts == sorted(firsts), "groups come in the order of their first boxes"
    for number, box in enumerate(boxes):
        joins = [first for first in firsts if first < number and overlap(box, boxes[first]) >= SAME_PART]
        (group,) = [group for group in groups if number in group]
        assert group[0] == (joins[0] if joins else number)


def test_a_row_of_neighbours_is_no_chain() -> None:
    """Each lies on the next by half or more, but the ends have nothing in common."""
    boxes: list[Box] = [(x, 0.0, x + 3.0, 3.0) for x in (0.0, 1.0, 2.0, 3.0)]
    assert group_by_part(boxes) == [[0, 1], [2, 3]]
