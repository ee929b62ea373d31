"""The paper's boxes against loops that follow its words, and the small pictures drawn around them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.tiny import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from likethat.data.decode import Box
from likethat.errors import UserError
from likethat.explaining import boxes
from likethat.explaining.boxes import activation_boxes, cell_box, match_boxes, upsample
from likethat.explaining.draw.heat import colour_table, heat_layer, overlay
from likethat.explaining.draw.render import draw_box


def cubic(distance: float) -> float:
    """Keys's kernel with a = -0.75, as OpenCV and torch have it."""
    a, d = -0.75, abs(distance)
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


def slow_upsample(values: list[list[float]], height: int, width: int) -> list[list[float]]:
    rows, columns = len(values), len(values[0])
    result = []
    for y in range(height):
        at_y = (y + 0.5) * rows / height - 0.5
        line = []
        for x in range(width):
            at_x = (x + 0.5) * columns / width - 0.5
            total = 0.0
            for row in range(math.floor(at_y) - 1, math.floor(at_y) + 3):
                for column in range(math.floor(at_x) - 1, math.floor(at_x) + 3):
                    value = values[min(max(row, 0), rows - 1)][min(max(column, 0), columns - 1)]
                    total += value * cubic(at_y - row) * cubic(at_x - column)
            line.append(total)
        result.append(line)
    return result


def slow_box(values: list[list[float]], height: int, width: int, percentile: float, slack: float = 1e-9) -> Box:
    """Slack lets pixels in that lie that far below the threshold: those that only rounding keeps from being equal."""
    pixels = slow_upsample(values, height, width)
    ordered = sorted(value for line in pixels for value in line)
    place = (len(ordered) - 1) * percentile / 100
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    threshold = below + (above - below) * (place - math.floor(place)) - slack
    inside = [(x, y) for y, line in enumerate(pixels) for x, value in enumerate(line) if value >= threshold]
    xs, ys = [x for x, _ in inside], [y for _, y in inside]
    return min(xs), min(ys), max(xs) + 1, max(ys) + 1


def contains(outer: Box, inner: Box) -> bool:
    return outer[0] <= inner[0] and outer[1] <= inner[1] and outer[2] >= inner[2] and outer[3] >= inner[3]


@pytest.mark.parametrize("percentile", [0.0, 50.0, 80.0, 95.0, 99.5, 100.0])
@pytest.mark.parametrize(("map_hw", "size_hw"), [((7, 7), (28, 28)), ((3, 5), (24, 31)), ((1, 4), (9, 20))])
def test_boxes_are_those_of_the_loops(percentile: float, map_hw: tuple[int, int], size_hw: tuple[int, int]) -> None:
    map_PHW = torch.randn(4, *map_hw) * 3 + 5
    expected = [slow_box(values, *size_hw, percentile) for values in map_PHW.double().tolist()]
    assert activation_boxes(map_PHW, size_hw, percentile) == expected


maps_with_ties = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(st.integers(-3, 3), min_size=width, max_size=width), min_size=1, max_size=4)
)


@settings(max_examples=120, deadline=None)
@given(
    values=maps_with_ties,
    height=st.integers(4, 13),
    width=st.integers(4, 13),
    percentile=st.sampled_from([0.0, 30.0, 75.0, 90.0, 95.0, 100.0]),
)
def test_ties_belong_to_the_box(values: list[list[int]], height: int, width: int, percentile: float) -> None:
    numbers = [[float(value) for value in line] for line in values]
    (box,) = activation_boxes(torch.tensor([numbers]), (height, width), percentile)
    span = max(map(max, numbers)) - min(map(min, numbers))
    if span == 0:
        assert box == (0, 0, width, height)
        return
    assert contains(box, slow_box(numbers, height, width, percentile, slack=1e-9 * span))
    assert contains(slow_box(numbers, height, width, percentile, slack=1e-4 * span), box)


def test_threshold_is_numpys_linear_percentile() -> None:
    map_PHW = torch.rand(20, 7, 7)
    for box, values in zip(activation_boxes(map_PHW, (56, 56)), map_PHW, strict=True):
        pixels = F.interpolate(values[None, None], (56, 56), mode="bicubic", align_corners=False)[0, 0].numpy()
        ys, xs = np.nonzero(pixels >= np.percentile(pixels, 95))
        assert box == (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)


def test_upsampling_is_bicubic_interpolation() -> None:
    map_PHW = torch.randn(3, 7, 5)
    expected = F.interpolate(map_PHW[None], (64, 90), mode="bicubic", align_corners=False)[0]
    torch.testing.assert_close(upsample(map_PHW, (64, 90)), expected, atol=2e-6, rtol=0)


def test_memory_chunks_do_not_change_the_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    map_PHW = torch.rand(9, 4, 4)
    whole = activation_boxes(map_PHW, (32, 32))
    monkeypatch.setattr(boxes, "CHUNK_PIXELS", 2 * 32 * 32)
    assert activation_boxes(map_PHW, (32, 32)) == whole


@pytest.mark.parametrize(("cells", "margin"), [(0.0, (0, 0)), (0.5, (16, 12)), (0.25, (8, 6))])
def test_boxes_have_the_runs_margin_around_them(cells: float, margin: tuple[int, int]) -> None:
    model = tiny_model([3], input_size=(96, 48), box_margin=cells)
    assert model.backbone.map_size == (3, 2)
    map_PHW = torch.rand(5, 3, 2, generator=torch.Generator().manual_seed(0))
    for percentile in (80.0, 95.0):
        expected = []
        for values in map_PHW.double().tolist():
            x0, y0, x1, y1 = slow_box(values, 96, 48, percentile)
            down, across = margin
            expected.append((max(0, x0 - across), max(0, y0 - down), min(48, x1 + across), min(96, y1 + down)))
        assert match_boxes(model, map_PHW, percentile) == expected
    other_PHW = torch.rand(5, 9, 9, generator=torch.Generator().manual_seed(1))
    assert match_boxes(model, map_PHW, 90.0, other_PHW) == activation_boxes(other_PHW, (96, 48), 90.0)


@pytest.mark.parametrize("percentile", [-1.0, 100.5, math.nan])
def test_percentile_outside_its_range_is_refused(percentile: float) -> None:
    with pytest.raises(UserError, match="between 0 and 100"):
        activation_boxes(torch.rand(1, 2, 2), (8, 8), percentile)


def test_cells_tile_the_picture() -> None:
    cells = [cell_box(row, column, (3, 5), (1, 1), (96, 200)) for row in range(3) for column in range(5)]
    assert cells[0] == (0, 0, 40, 32)
    assert cells[7] == (80, 32, 120, 64)
    assert cells[-1] == (160, 64, 200, 96)
    assert cell_box(1, 2, (3, 5), (2, 3), (96, 200)) == (80, 32, 200, 96)


def test_colours_get_lighter_from_cold_to_hot() -> None:
    luminance = colour_table().astype(float) @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(luminance) > -0.5).all()
    assert luminance[-1] - luminance[0] > 150
    # The rainbow's ends are dark blue and dark red.
    assert colour_table("jet")[0].tolist() == [0, 0, 128]
    assert colour_table("jet")[-1].tolist() == [128, 0, 0]


def test_heat_is_hottest_where_the_map_is_largest() -> None:
    map_HW = torch.zeros(3, 5)
    map_HW[1, 4] = 1
    alpha_HW = np.asarray(heat_layer(map_HW, (50, 30)))[..., 3]
    y, x = np.unravel_index(alpha_HW.argmax(), alpha_HW.shape)
    assert 10 <= y < 20
    assert 40 <= x < 50
    drawn = overlay(Image.new("RGB", (50, 30), "grey"), map_HW)
    assert drawn.size == (50, 30)
    hot, cold = drawn.getpixel((46, 15)), drawn.getpixel((10, 15))
    assert isinstance(hot, tuple)
    assert isinstance(cold, tuple)
    assert sum(hot) > sum(cold) + 100


def test_outline_is_light_within_dark_and_leaves_the_rest_alone() -> None:
    plain = Image.new("RGB", (40, 30), (90, 120, 150))
    drawn = np.asarray(draw_box(plain, (10, 5, 30, 25), 2)).astype(int)
    assert plain.getcolors() == [(1200, (90, 120, 150))]
    changed_yx = np.argwhere((drawn != [90, 120, 150]).any(2))
    assert changed_yx.min(0).tolist() == [5, 10]
    assert changed_yx.max(0).tolist() == [24, 29]
    assert drawn[15, 10].sum() < 100 < 400 < drawn[15, 11].sum()
    assert (drawn[9:21, 14:26] == [90, 120, 150]).all()
