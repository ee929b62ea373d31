"""Which boxes show the same part of a picture."""

from __future__ import annotations

from collections.abc import Sequence

from likethat.data.decode import Box

SAME_PART = 0.5  # least intersection over union of two boxes around the same part


def overlap(a: Box, b: Box) -> float:
    """Return the intersection over union of two boxes."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(0.0, width) * max(0.0, height)
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def group_by_part(boxes: Sequence[Box]) -> list[list[int]]:
    """Return the numbers of the boxes in groups, one for each part.

    Boxes come in order of importance. Each joins the first group whose first box it overlaps by SAME_PART or more, or
    begins a group of its own. All boxes of a group thus lie on its first one: no chain of neighbours grows across the
    picture.
    """
    groups: list[list[int]] = []
    for number, box in enumerate(boxes):
        same = (group for group in groups if overlap(box, boxes[group[0]]) >= SAME_PART)
        group = next(same, None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    return groups
