"""Views that are always the same, of pictures that may be large."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from likethat.config.presets import resolve
from likethat.data import loaders
from likethat.data.augment import show
from likethat.data.dataset import Sample
from likethat.data.loaders import Images, hold, views_of

COUNT, SIDE = 5, 12


@pytest.fixture(scope="module")
def images() -> Images:
    pixel_NHW3 = np.random.default_rng(0).integers(0, 256, (COUNT, SIDE, SIDE, 3), np.uint8)
    return hold(pixel_NHW3, tuple(Sample(f"{label}.png", label) for label in range(COUNT)), torch.device("cpu"))


@pytest.mark.parametrize("at_once", [1, 3, 2 * COUNT])
def test_large_views_made_a_few_at_a_time_are_the_same(
    images: Images, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(loaders, "VIEW_PIXELS", at_once * SIDE**2)
    viewed = views_of(images, resolve("paper").augment, 7, count=2)
    row_B = torch.arange(2 * COUNT).roll(3)
    x_B3HW, label_B = viewed.batch(row_B)
    assert label_B.tolist() == (row_B % COUNT).tolist()
    for x_3HW, row in zip(x_B3HW, row_B, strict=True):
        whole_13HW, _ = images.batch(row[None] % COUNT)
        torch.testing.assert_close(x_3HW, show(whole_13HW, viewed.views[row[None]])[0], rtol=0, atol=1e-6)
