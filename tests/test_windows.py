"""Which windows a picture can be cut into, and what is said about others."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from likethat.config.presets import resolve
from likethat.errors import UserError
from likethat.windows import NO_WINDOWS, SMALLEST, Windows, check_windows


def covered(size: int, stride: int, size_hw: tuple[int, int]) -> bool:
    """By painting every window that lies in the picture."""
    painted = np.zeros(size_hw, bool)
    for y in range(0, size_hw[0] - size + 1, stride):
        for x in range(0, size_hw[1] - size + 1, stride):
            painted[y : y + size, x : x + size] = True
    return bool(painted.all())


@given(st.integers(16, 40), st.integers(1, 45), st.integers(16, 60), st.integers(16, 60))
def test_windows_are_taken_if_and_only_if_they_cover_the_picture(
    size: int, stride: int, height: int, width: int
) -> None:
    if covered(size, stride, (height, width)):
        check_windows((size, stride), (height, width))
        rows, columns = Windows(size, stride).grid((height, width))
        assert len(range(0, height - size + 1, stride)) == rows
        assert len(range(0, width - size + 1, stride)) == columns
        seen = rows * columns * size * size
        assert Windows(size, stride).cost((height, width)) == pytest.approx(seen / (height * width))
        return
    with pytest.raises(UserError) as caught:
        check_windows((size, stride), (height, width))
    if size > min(height, width):
        assert "larger than" in str(caught.value)
        return
    named = [
        (int(size), int(stride)) for size, stride in re.findall(r"(\d+),(\d+)", str(caught.value).split("take ")[1])
    ]
    assert named
    for values in named:
        assert covered(*values, (height, width))
        check_windows(values, (height, width))
    # No other stride that works is nearer, for the size that was asked for.
    nearest = next(other for own, other in named if own == size)
    working = [other for other in range(1, size + 1) if covered(size, other, (height, width))]
    assert abs(nearest - stride) == min(abs(other - stride) for other in working)


def test_the_option() -> None:
    assert resolve(windows="80,24").model.windows == (80, 24)
    assert resolve(windows="80x24").model.windows == (80, 24)
    assert resolve(windows="none").model.windows == resolve().model.windows == NO_WINDOWS
    with pytest.raises(UserError, match=r"80,24 or 74,25"):
        resolve(windows="80,25")
    with pytest.raises(UserError, match="larger than the 96x96 picture"):
        resolve(windows="100,10", input_size=96)
    for windows in (f"{SMALLEST - 1},1", "80,0", "80,-24"):
        with pytest.raises(UserError, match="at least 16 and a stride of at least 1"):
            resolve(windows=windows)
