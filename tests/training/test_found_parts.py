"""Parts that are found without annotation."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import tiny_model

from likethat.data.cells import tiles
from likethat.inference.feature_maps import FeatureMaps
from likethat.training import parts as parts_module
from likethat.training.parts import NEAR, find_parts, k_means, locate


def test_peaks_and_compactness_are_those_of_the_loops() -> None:
    generator = torch.Generator().manual_seed(5)
    patch_BDHW = torch.nn.functional.normalize(torch.randn(6, 4, 5, 7, generator=generator), dim=1)
    centre_MD = 0.8 * torch.nn.functional.normalize(torch.randn(5, 4, generator=generator), dim=1)
    place_BM, compact_BM = locate(patch_BDHW, centre_MD)
    for b in range(6):
        cells = [(y, x) for y in range(5) for x in range(7)]
        distance = {
            cell: [float((patch_BDHW[b, :, cell[0], cell[1]] - centre).square().sum()) for centre in centre_MD]
            for cell in cells
        }
        for m in range(5):
            lead = {cell: min(far[:m] + far[m + 1 :]) - far[m] for cell, far in distance.items()}
            peak = max(cells, key=lambda cell: lead[cell])
            own = [cell for cell in cells if lead[cell] > 0]
            near = [(y, x) for y, x in own if max(abs(y - peak[0]), abs(x - peak[1])) <= NEAR]
            assert divmod(int(place_BM[b, m]), 7) == peak
            assert float(compact_BM[b, m]) == (torch.tensor(len(near)) / max(1, len(own))).item()


def test_what_most_images_show_in_one_place_is_a_part_and_backgrounds_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty images on four kinds of ground, each with two small things, of which the second is sometimes hidden."""
    monkeypatch.setattr(parts_module, "KINDS", 12)
    generator = torch.Generator().manual_seed(1)
    kind_6D = torch.eye(6)
    map_NDHW = torch.zeros(40, 6, 8, 8)
    place: dict[int, list[int]] = {4: [], 5: []}
    for n in range(40):
        map_NDHW[n] = kind_6D[n % 4][:, None, None]
        for thing in (4, 5):
            y, x = torch.randint(8, (2,), generator=generator).tolist()
            while thing == 5 and 8 * y + x == place[4][n]:
                y, x = torch.randint(8, (2,), generator=generator).tolist()
            place[thing].append(8 * y + x)
            if thing == 4 or n % 5:
                map_NDHW[n, :, y, x] = kind_6D[thing]
    map_NDHW += 0.02 * torch.randn(map_NDHW.shape, generator=generator)
    backbone = tiny_model([2, 2]).backbone
    backbone.channels, backbone.map_size = 6, (8, 8)
    found = find_parts(backbone, FeatureMaps(map_NDHW, torch.arange(40) % 2, torch.device("cpu")), 2)
    assert found.shown_Nm[:, 0].all(), "the one that is always there comes first"
    assert found.place_Nm[:, 0].tolist() == place[4]
    seen = torch.arange(40) % 5 > 0
    assert torch.equal(found.shown_Nm[:, 1], seen)
    assert torch.equal(found.place_Nm[seen, 1], torch.tensor(place[5])[seen])
    x, y = found.middles(tiles((8, 8)))[0, 0].tolist()
    assert (x, y) == (place[4][0] % 8 / 4 - 0.875, place[4][0] // 8 / 4 - 0.875)
    assert found.middles(tiles((8, 8)))[~seen, 1].isnan().all()


def test_centres_are_means_of_what_is_nearest_to_them() -> None:
    generator = torch.Generator().manual_seed(3)
    heap_SD = torch.eye(5).repeat_interleave(30, 0) * 4 + 0.1 * torch.randn(150, 5, generator=generator)
    centre_MD = k_means(heap_SD, 5)
    order_M = centre_MD.argmax(1)
    assert sorted(order_M.tolist()) == [0, 1, 2, 3, 4]
    torch.testing.assert_close(centre_MD[order_M.argsort()], heap_SD.unflatten(0, (5, 30)).mean(1))
