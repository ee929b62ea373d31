"""Metrics that need part annotations: known by construction, and against slow literal versions."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.metric_cases import MAP, SIDE, case, noisy, point, spot
from helpers.runs import make_tiny_birds
from torch import Tensor

from likethat.data.decode import View
from likethat.data.formats import open_dataset
from likethat.data.parts import PartTable, read_parts
from likethat.explaining.boxes import activation_boxes, upsample
from likethat.metrics.consistency import Consistency
from likethat.metrics.coverage import coverages
from likethat.metrics.decisive import Decisive
from likethat.metrics.part_hits import in_squares
from likethat.metrics.purity import Purity, PurityOfUnseen, trimmed
from likethat.metrics.regions import peaks_of_maps
from likethat.metrics.stability import Stability


def literal_regions(map_HW: Tensor, part_Q4: Tensor) -> list[bool]:
    """The parts within 36 px (at 224) of the largest pixel, as the authors count: parts and pixels in whole pixels,
    the square cut off at the rim of the picture, its own rim included."""
    pixels = upsample(map_HW[None], (SIDE, SIDE))[0].tolist()
    best, where = -math.inf, (0, 0)
    for y in range(SIDE):
        for x in range(SIDE):
            if pixels[y][x] > best:
                best, where = pixels[y][x], (x, y)
    half, found = 36 / 224 * SIDE, []
    low = [max(0, place - half) for place in where]
    high = [min(SIDE, place + half) for place in where]
    for x0, y0, x1, y1 in part_Q4.tolist():
        if math.isnan(x0):
            found.append(False)
            continue
        part = int((x0 + x1) / 2 * SIDE), int((y0 + y1) / 2 * SIDE)
        found.append(all(low[axis] <= part[axis] <= high[axis] for axis in (0, 1)))
    return found


def random_case(seed: int) -> tuple[Tensor, list[int], list[int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    map_BPHW = torch.rand(9, 5, MAP, MAP, generator=generator)
    labels, classes = [0, 1, 2, 0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 2]
    part_BQ4 = torch.rand(9, 3, 2, generator=generator).repeat(1, 1, 2)
    part_BQ4[torch.rand(9, 3, generator=generator) < 0.3] = math.nan
    return map_BPHW, labels, classes, part_BQ4


@pytest.mark.parametrize(("peak", "part", "inside"), [(100, 136.9, True), (100, 137.0, False), (100, 64.0, True)])
def test_the_square_reaches_36_whole_pixels_at_224(peak: int, part: float, inside: bool) -> None:
    """Bounds of the authors' code: int(part) in [peak - 36, peak + 36]."""
    place = torch.tensor([[[part, 100.0, part, 100.0]]]) / 224
    for axes in ([0, 1, 2, 3], [1, 0, 3, 2]):  # across and down
        pixel = torch.tensor([[peak, 100]])[:, axes[:2]]
        assert bool(in_squares(pixel, place[..., axes], (224, 224))) is inside


def test_a_part_outside_the_picture_is_in_no_square() -> None:
    parts = torch.tensor([[[-2.0, 5.0, -2.0, 5.0], [-0.5, 5.0, -0.5, 5.0], [2.0, 5.0, 2.0, 5.0]]]) / 224
    assert in_squares(torch.tensor([[3, 3]]), parts, (224, 224)).tolist() == [[False, True, True]]


def test_a_prototype_that_always_lands_on_its_part_is_consistent_and_one_that_wanders_is_not() -> None:
    places = [(0.1, 0.1), (0.9, 0.1), (0.1, 0.9), (0.9, 0.9)]
    maps = torch.stack([torch.stack([spot(*place), spot(0.4, 0.4)]) for place in places])
    parts = torch.tensor([[point(*place)] for place in places])
    metric = Consistency(case(maps, [0] * 4, [0, 0], part_BQ4=parts).subject)
    metric.collect(case(maps, [0] * 4, [0, 0], part_BQ4=parts))
    assert metric.by_prototype()["consistency"].tolist() == [1.0, 0.0]
    assert metric.figures()[0].value == 0.5


@pytest.mark.parametrize("seed", range(5))
def test_consistency_is_that_of_the_definition(seed: int) -> None:
    map_BPHW, labels, classes, part_BQ4 = random_case(seed)
    consistent, shares = [], []
    for p, own in enumerate(classes):
        hits, visible = np.zeros(3), np.zeros(3)
        for b in (b for b, label in enumerate(labels) if label == own):
            hits += literal_regions(map_BPHW[b, p], part_BQ4[b])
            visible += [not math.isnan(part[0]) for part in part_BQ4[b].tolist()]
        share = max(hit / max(seen, 1) for hit, seen in zip(hits, visible, strict=True))
        shares.append(share)
        consistent.append(share >= 0.8)
    batch = case(map_BPHW, labels, classes, part_BQ4=part_BQ4)
    metric = Consistency(batch.subject)
    metric.collect(batch)
    assert metric.by_prototype()["consistency"].tolist() == pytest.approx(shares)
    assert metric.figures()[0].value == pytest.approx(np.mean(consistent))


def test_parts_of_the_embedded_birds_lie_where_the_generator_put_them(tmp_path: Path) -> None:
    birds = make_tiny_birds(tmp_path / "birds")
    dataset = open_dataset(birds)
    table = read_parts(dataset)
    assert table is not None
    written = json.loads((birds / "parts.json").read_text())
    sample = dataset.test[0]
    view = View((0, 0, 64, 64), (32, 128), (64, 64))
    part_NQ4, object_N4 = table.shares([sample], [view])
    for number, name in enumerate(table.names):
        assert (part_NQ4[0, number] * 64).tolist() == pytest.approx(written[sample.path][name])
    assert (object_N4[0] * 64).tolist() == pytest.approx(written[sample.path]["bird"])
    first, second, part = table.pairs[0]
    assert (first, second, table.names[part]) == ("Crimson-crowned_Finch", "Golden-crowned_Finch", "crown")


def test_stability_counts_pictures_whose_parts_stay_the_same() -> None:
    parts = torch.tensor([[point(0.1, 0.1), point(0.9, 0.9)]] * 4)
    before = torch.stack([torch.stack([spot(0.1, 0.1), spot(0.1, 0.1)])] * 4)
    after = before.clone()
    after[1, 1], after[2, 1] = spot(0.9, 0.9), spot(0.4, 0.4)  # the other part, no part
    after[3, 1] = spot(0.2, 0.2)  # moved, but on the same part
    batch = noisy(case(before, [0] * 4, [0, 0], part_BQ4=parts), after)
    metric = Stability(batch.subject)
    metric.collect(batch)
    assert metric.share_P().tolist() == [1.0, 0.5]
    assert metric.figures()[0].value == 0.75


@pytest.mark.parametrize("seed", range(3))
def test_stability_is_that_of_the_definition(seed: int) -> None:
    map_BPHW, labels, classes, part_BQ4 = random_case(seed)
    noisy_BPHW = random_case(seed + 100)[0]
    expected = []
    for p, own in enumerate(classes):
        same = [
            literal_regions(map_BPHW[b, p], part_BQ4[b]) == literal_regions(noisy_BPHW[b, p], part_BQ4[b])
            for b, label in enumerate(labels)
            if label == own and not part_BQ4[b].isnan().all()
        ]
        expected.append(np.mean(same))
    batch = noisy(case(map_BPHW, labels, classes, part_BQ4=part_BQ4), noisy_BPHW)
    metric = Stability(batch.subject)
    metric.collect(batch)
    assert metric.figures()[0].value == pytest.approx(np.mean(expected))


def literal_purity(map_BPHW: Tensor, part_BQ4: Tensor, sides: list[int], p: int) -> float:
    """The ten most similar pictures one by one, the patch, and the parts in it."""
    order = sorted(range(len(map_BPHW)), key=lambda b: -float(map_BPHW[b, p].max()))[:10]
    present: dict[int, list[bool]] = {}
    for b in order:
        box = activation_boxes(map_BPHW[b, p][None], (SIDE, SIDE))[0]
        x0, y0, x1, y1 = (edge * 224 / SIDE for edge in box)
        if x1 - x0 > 32:
            x0, x1 = x0 + (x1 - x0 - 32) // 2, x1 - (x1 - x0 - 32) // 2
        if y1 - y0 > 32:
            y0, y1 = y0 + (y1 - y0 - 32) // 2, y1 - (y1 - y0 - 32) // 2
        here: dict[int, bool] = {}
        for q, (x, y, _, _) in enumerate(part_BQ4[b].tolist()):
            if not math.isnan(x):
                inside = x0 <= x * 224 <= x1 and y0 <= y * 224 <= y1
                here[sides[q]] = here.get(sides[q], False) or inside
        for side, inside in here.items():
            present.setdefault(side, []).append(inside)
    return max(float(np.mean(found)) for found in present.values())


@pytest.mark.parametrize("seed", range(4))
def test_purity_is_that_of_the_definition(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    map_BPHW = torch.rand(25, 4, MAP, MAP, generator=generator)
    part_BQ4 = (torch.randint(0, 5, (25, 3, 2), generator=generator) / 4 * 0.8 + 0.1).repeat(1, 1, 2)
    part_BQ4[torch.rand(25, 3, generator=generator) < 0.4] = math.nan
    table = PartTable(("left eye", "tail", "right eye"), {}, {})
    weight_KP = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0]])
    batch = case(map_BPHW, [0] * 12 + [1] * 13, [0, 0, 1, 1], weight_KP, part_BQ4, table)
    metric, unseen = Purity(replace(batch.subject, train=batch.subject.samples)), PurityOfUnseen(batch.subject)
    for rows in torch.arange(25).split(7):  # the search goes on from batch to batch
        piece = case(map_BPHW[rows], [0] * len(rows), [0, 0, 1, 1], weight_KP, part_BQ4[rows], table)
        piece.index_B = rows
        metric.collect(piece)
        unseen.collect(piece)
    expected = [literal_purity(map_BPHW, part_BQ4, [0, 1, 0], p) for p in range(3)]
    purity_P = metric.by_prototype()["purity"].tolist()
    assert purity_P[:3] == pytest.approx(expected)
    assert math.isnan(purity_P[3]), "no class has a positive connection to it"
    assert metric.figures()[0].value == unseen.figures()[0].value == pytest.approx(np.mean(expected))
    assert "10 nearest of 25 training images" in metric.figures()[0].note
    assert "10 nearest of 25 test images" in unseen.figures()[0].note
    assert "18.3 px (32 at 224)" in metric.figures()[0].note


def test_without_the_training_images_there_is_no_published_purity() -> None:
    parts = torch.tensor([[point(0.1, 0.1)]])
    (figure,) = Purity(case(spot(0.1, 0.1)[None, None], [0], [0], part_BQ4=parts).subject).figures()
    assert figure.value is None
    assert "other images" in figure.note


@pytest.mark.parametrize(
    ("box", "expected"),
    [((0, 0, 32, 20), (0, 0, 32, 20)), ((10, 10, 43, 44), (10, 11, 43, 43)), ((0, 0, 224, 67), (96, 17, 128, 50))],
)
def test_patches_lose_whole_pixels_at_both_ends(box: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert (trimmed(torch.tensor(box) / 224) * 224).tolist() == pytest.approx(expected, abs=1e-3)


def test_patches_on_the_part_are_pure() -> None:
    places = [(0.125, 0.125), (0.875, 0.125), (0.375, 0.875)] * 4  # middles of cells
    maps = torch.stack([torch.stack([spot(*place), spot(0.625, 0.625)]) for place in places])
    parts = torch.tensor([[point(*place)] for place in places])
    batch = case(maps, [0] * 12, [0, 0], torch.ones(1, 2), parts)
    metric = Purity(replace(batch.subject, train=batch.subject.samples))
    metric.collect(batch)
    assert metric.by_prototype()["purity"].tolist() == [1.0, 0.0]


def test_coverage_counts_parts_that_a_used_prototype_finds_in_half_of_the_pictures() -> None:
    hit_PQ = torch.tensor([[5, 0, 4], [0, 10, 0], [0, 0, 9], [3, 3, 3]])
    visible_PQ = torch.tensor([[10, 10, 10], [10, 10, 10], [10, 10, 10], [3, 0, 6]])
    class_P, used_P = torch.tensor([0, 0, 0, 1]), torch.tensor([True, True, False, True])
    # Class 0: the first part by half, the second wholly, the third by a prototype that is not used. Class 1 shows two.
    assert coverages(hit_PQ, visible_PQ, class_P, used_P, 2).tolist() == pytest.approx([2 / 3, 1.0])


def pair_case(own_place: tuple[float, float], box: list[float], copies: int = 1) -> Decisive:
    """Two classes that differ in one part; the prototype that tells class 0 apart lands at `own_place`, another one,
    which both classes share, on the part."""
    table = PartTable(("crown", "tail"), {}, {}, (("class 0", "class 1", 0),))
    weight_KP = torch.tensor([[1.0, 3.0], [0.0, 3.0]])
    maps = torch.stack([spot(*own_place), spot(0.1, 0.1)])[None].repeat(copies, 1, 1, 1)
    parts = torch.tensor([[box, [0.9, 0.9, 1.0, 1.0]]]).repeat(copies, 1, 1)
    batch = case(maps, [0] * copies, [0, 1], weight_KP, parts, table)
    metric = Decisive(batch.subject)
    metric.collect(batch)
    return metric


def test_evidence_on_the_part_wins_the_pointing_game_and_elsewhere_loses_it() -> None:
    box = [0.0, 0.0, 0.25, 0.25]
    pointing, points, distance = pair_case((0.125, 0.125), box).figures()
    assert (pointing.value, points.value, distance.value) == (1.0, 1.0, 0.0)
    pointing, points, distance = pair_case((0.875, 0.125), box).figures()
    assert (pointing.value, points.value) == (0.0, 0.0)
    peak = peaks_of_maps(spot(0.875, 0.125)[None], (SIDE, SIDE))[0, 0]
    assert distance.value == pytest.approx(float(peak) - 0.25)


def test_evidence_at_random_wins_as_often_as_the_part_is_large() -> None:
    generator = torch.Generator().manual_seed(0)
    table = PartTable(("crown",), {}, {}, (("class 0", "class 1", 0),))
    size = 0.4
    maps = torch.stack([spot(*torch.rand(2, generator=generator).tolist()) for _ in range(600)])[:, None]
    maps = torch.cat([maps, torch.zeros_like(maps)], 1)
    corner_N2 = torch.rand(600, 2, generator=generator) * (1 - size)
    parts = torch.cat([corner_N2, corner_N2 + size], 1)[:, None]
    batch = case(maps, [0] * 600, [0, 1], torch.eye(2), parts, table)
    metric = Decisive(batch.subject)
    metric.collect(batch)
    pointing = metric.figures()[0]
    chance = torch.cat(metric.chance).mean()
    assert pointing.value == pytest.approx(float(chance), abs=0.07)
    assert f"{chance:.1%}" in pointing.note
