"""Hidden parts: what lies under a rectangle must not count, and the rest must stay as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.explain_run import CELL_HW, MAP_HW, TO_STORED, TinyRun, grid_picture, make_run
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from likethat.data.decode import Box, View, to_input
from likethat.errors import UserError
from likethat.explaining.explanation import explain
from likethat.explaining.hiding import MOST_HIDDEN, covered, hide_boxes, painted, read_box
from likethat.runs.classifier import Classifier, load

NOTE = "A part of it was painted over with the mean colour of the rest before the model saw the picture."
SHARE = st.floats(0, 1).map(lambda value: round(value, 3))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("hiding"))


@pytest.fixture(scope="module")
def classifier(run: TinyRun) -> Classifier:
    return load(run.path, "cpu")


@given(
    st.lists(st.tuples(SHARE, SHARE, SHARE, SHARE), min_size=1, max_size=3),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
def test_painting_pixel_by_pixel(corners: list[Box], source_wh: tuple[int, int]) -> None:
    """All that changes with the pixels under the rectangles is painted, and little else."""
    height, width = 7, 10
    shares = [(min(a, c), min(b, d), max(a, c) + 0.001, max(b, d) + 0.001) for a, b, c, d in corners]
    generator = np.random.default_rng(0)
    source = generator.integers(0, 256, (source_wh[1], source_wh[0], 3), np.uint8)
    under = np.zeros(source.shape[:2], bool)
    for x0, y0, x1, y1 in shares:
        for y in range(source_wh[1]):
            for x in range(source_wh[0]):
                across = x0 * source_wh[0] < x + 1 and x < x1 * source_wh[0]
                under[y, x] |= across and y0 * source_wh[1] < y + 1 and y < y1 * source_wh[1]
    pixels, view = to_input(Image.fromarray(source), None, (height, width))
    hidden = covered(shares, view)
    assert hidden.any()
    for level in (0, 255):
        changed = np.where(under[..., None], np.uint8(level), source)
        other, _ = to_input(Image.fromarray(changed), None, (height, width))
        assert not ((other != pixels).any(2) & ~hidden.numpy()).any()
    if source_wh == (width, height):
        assert np.array_equal(hidden.numpy(), under)
    picture = painted(torch.from_numpy(pixels).permute(2, 0, 1), hidden)
    for channel in range(3):
        values = [int(pixels[y, x, channel]) for y in range(height) for x in range(width) if not hidden[y, x]]
        colour = round(sum(values) / len(values)) if values else 128
        for y in range(height):
            for x in range(width):
                expected = colour if hidden[y, x] else int(pixels[y, x, channel])
                assert int(picture[channel, y, x]) == expected


def test_a_box_of_a_line_is_hidden_with_one_pixel_around_it() -> None:
    view = View((0, 0, 672, 448), (224, 224), (448, 672))
    hidden = covered([(50 / 224, 60 / 224, 80 / 224, 90 / 224)], view)
    assert int(hidden.sum()) == 32 * 32
    assert bool(hidden[59:91, 49:81].all())


@given(
    st.integers(1, 8),
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.tuples(*[st.floats(0, 1)] * 4),
)
def test_the_way_to_the_file_and_back(orientation: int, upright_hw: tuple[int, int], share: Box) -> None:
    view = View((0, 0, upright_hw[1], upright_hw[0]), (64, 96), upright_hw, orientation)
    stored = view.to_file((share[0] * 96, share[1] * 64, share[2] * 96, share[3] * 64))
    assert view.from_file(stored) == pytest.approx(share, abs=1e-9)


@pytest.mark.parametrize("orientation", TO_STORED)
def test_what_is_hidden_does_not_count(run: TinyRun, classifier: Classifier, tmp_path: Path, orientation: int) -> None:
    """Two pictures that differ in one cell are the same picture once that cell is hidden, however they are stored."""
    generator = np.random.default_rng(orientation)
    colours = generator.integers(0, 256, (*MAP_HW, 3), np.uint8)
    other = colours.copy()
    other[1, 2] = 255 - other[1, 2]
    cell = (2 * CELL_HW[1], CELL_HW[0], 3 * CELL_HW[1], 2 * CELL_HW[0])  # upright
    logits, boxes = [], []
    for name, cells in (("a.png", colours), ("b.png", other)):
        grid_picture(tmp_path / name, cells, orientation)
        width, height = MAP_HW[1] * CELL_HW[1], MAP_HW[0] * CELL_HW[0]
        view = View((0, 0, width, height), (height, width), (height, width), orientation)
        box = view.to_file(cell)
        whole = explain(classifier, tmp_path / name)
        hidden = explain(classifier, tmp_path / name, hide=[box])
        logits.append((whole.predicted.logit, hidden.predicted.logit))
        boxes.append(hidden.to_dict()["hidden"])
        assert [hidden.hidden_note, whole.hidden_note] == [NOTE, ""]
        seen = np.asarray(hidden.picture)[cell[1] : cell[3], cell[0] : cell[2]].reshape(-1, 3)
        assert len(np.unique(seen, axis=0)) == 1, "people see what was painted"
        left = np.asarray(hidden.picture)[: cell[1]]
        assert np.array_equal(left, np.asarray(whole.picture)[: cell[1]])
        assert "hidden" not in whole.to_dict()
        assert hidden.figure().height == whole.figure().height
    assert logits[0][0] != logits[1][0]
    assert logits[0][1] == logits[1][1], "to the last bit"
    assert boxes[0] == boxes[1] == [pytest.approx(box)]


def test_the_hidden_part_reaches_every_member(run: TinyRun, tmp_path: Path) -> None:
    other = make_run(tmp_path, seed=3, per_class=1, input_size="64x64")
    both = Classifier(run.path, run.classes, [run.model, other.model], [*run.prototypes, *other.prototypes])
    prepared = both.prepare(run.root / run.samples[0].path)
    hidden = hide_boxes(prepared, [(0, 0, 160, 288)])  # the left half
    for before, after in zip(prepared.pixels, hidden.pixels, strict=True):
        half = before.shape[2] // 2
        assert torch.equal(after[:, :, half + 1 :], before[:, :, half + 1 :])
        assert len(after[:, :, :half].flatten(1).unique(dim=1).T) == 1


def test_mistakes_get_a_sentence(run: TinyRun, classifier: Classifier) -> None:
    assert read_box("1,2.5,30, 4e1") == (1, 2.5, 30, 40)
    for text in ("", "1,2,3", "1,2,3,4,5", "a,b,c,d", "3,0,2,9", "0,5,1,5", "nan,0,1,1", "0,0,inf,1"):
        with pytest.raises(UserError, match="x0,y0,x1,y1"):
            read_box(text)
    prepared = classifier.prepare(run.root / run.samples[0].path)
    assert hide_boxes(prepared, []) is prepared
    with pytest.raises(UserError, match="outside of the picture"):
        hide_boxes(prepared, [(-9, -9, 0, 5)])
    with pytest.raises(UserError, match="outside of the picture"):
        hide_boxes(prepared, [(0, 10_000, 5, 10_001)])
    with pytest.raises(UserError, match=f"At most {MOST_HIDDEN} parts"):
        hide_boxes(prepared, [(0, 0, 5, 5)] * (MOST_HIDDEN + 1))
    everything = hide_boxes(prepared, [(-5, -5, 10_000, 10_000)])
    assert everything.pixels[0].unique().tolist() == [128]
    assert everything.hidden == ((0, 0, 1, 1),)
    assert Image.Image.getcolors(everything.image) is not None
