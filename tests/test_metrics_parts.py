"""Metrics that need part annotations: known by construction, and against slow literal versions."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from metric_cases import MAP, SIDE, case, point, spot
from runs import make_tiny_birds
from torch import Tensor

from likethat.data.dataset import open_dataset
from likethat.data.decode import View
from likethat.data.parts import read_parts
from likethat.explaining.boxes import upsample
from likethat.metrics.consistency import Consistency


def literal_regions(map_HW: Tensor, part_Q4: Tensor) -> list[bool]:
    """The parts in the square of 72/224 around the largest pixel, pixel by pixel."""
    pixels = upsample(map_HW[None], (SIDE, SIDE))[0]
    best, where = -math.inf, (0, 0)
    for y in range(SIDE):
        for x in range(SIDE):
            if pixels[y, x] > best:
                best, where = float(pixels[y, x]), (x, y)
    x, y = (where[0] + 0.5) / SIDE, (where[1] + 0.5) / SIDE
    return [
        abs((x0 + x1) / 2 - x) <= 36 / 224 and abs((y0 + y1) / 2 - y) <= 36 / 224 for x0, y0, x1, y1 in part_Q4.tolist()
    ]


def random_case(seed: int) -> tuple[Tensor, list[int], list[int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    map_BPHW = torch.rand(9, 5, MAP, MAP, generator=generator)
    labels, classes = [0, 1, 2, 0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 2]
    part_BQ4 = torch.rand(9, 3, 2, generator=generator).repeat(1, 1, 2)
    part_BQ4[torch.rand(9, 3, generator=generator) < 0.3] = math.nan
    return map_BPHW, labels, classes, part_BQ4


def test_a_prototype_that_always_lands_on_its_part_is_consistent_and_one_that_wanders_is_not() -> None:
    places = [(0.1, 0.1), (0.9, 0.1), (0.1, 0.9), (0.9, 0.9)]
    maps = torch.stack([torch.stack([spot(*place), spot(0.4, 0.4)]) for place in places])
    parts = torch.tensor([[point(*place)] for place in places])
    metric = Consistency(case(maps, [0] * 4, [0, 0], part_BQ4=parts).subject)
    metric.collect(case(maps, [0] * 4, [0, 0], part_BQ4=parts))
    assert metric.by_prototype()["part"].tolist() == [1.0, 0.0]
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
    assert metric.by_prototype()["part"].tolist() == pytest.approx(shares)
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
