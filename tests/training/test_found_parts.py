"""Parts that are found without annotation."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import tiny_model

from likethat.data.cells import tiles
from likethat.inference.feature_maps import FeatureMaps
from likethat.training import parts as parts_module
from likethat.training.parts import NEAR, find_parts, k_means, locate, share_of_class


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


def test_the_share_of_class_is_that_of_the_loops() -> None:
    """Classes of several sizes, one of them empty and one of a single vector; the third kind is the same in all."""
    generator = torch.Generator().manual_seed(2)
    label_N = torch.tensor([0] * 7 + [1] * 5 + [3] + [4] * 4)
    look_K3D = torch.randn(5, 3, 4, generator=generator) * torch.tensor([2.0, 0.5, 0.0])[:, None]
    vector_N3D = look_K3D[label_N] + torch.randn(17, 3, 4, generator=generator)
    total_K13D = torch.zeros(5, 1, 3, 4)
    total_K13D[:, 0].index_add_(0, label_N, vector_N3D)
    square_13 = vector_N3D.square().sum((0, 2))[None]
    count_K13 = label_N.bincount(minlength=5)[:, None, None].expand(-1, 1, 3)
    share_3 = share_of_class(total_K13D, square_13, count_K13)[0]
    for kind in range(3):
        vector_ND = vector_N3D[:, kind]
        spread = sum(float((vector_D - vector_ND.mean(0)).square().sum()) for vector_D in vector_ND)
        within = sum(
            float((vector_D - vector_ND[label_N == label].mean(0)).square().sum())
            for vector_D, label in zip(vector_ND, label_N.tolist(), strict=True)
        )
        # With 17 vectors in four classes: what is left of a spread that has nothing to do with class is 13/16.
        assert float(share_3[kind]) == pytest.approx(1 - (within / 13) / (spread / 16), abs=1e-5)
    assert share_3[0] > 0.5 > share_3[1] > share_3[2]


def test_where_classes_cannot_be_compared_there_is_no_share() -> None:
    """Two vectors of one class, and two classes of one vector."""
    total_K12D = torch.tensor([[[2.0, 0.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]])[:, None]
    count_K12 = torch.tensor([[[2, 1]], [[0, 1]]])
    assert share_of_class(total_K12D, torch.full((1, 2), 2.0), count_K12).tolist() == [[0.0, 0.0]]


def test_what_most_images_show_in_one_place_is_a_part_and_backgrounds_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty images on four kinds of ground, each with two small things that look a little otherwise in either class, of
    which the second is sometimes hidden, and with the same corner."""
    monkeypatch.setattr(parts_module, "KINDS", 12)
    generator = torch.Generator().manual_seed(1)
    kind_8D = torch.eye(8)
    map_NDHW = torch.zeros(40, 8, 8, 8)
    place: dict[int, list[int]] = {4: [], 5: []}
    for n in range(40):
        map_NDHW[n] = kind_8D[n // 2 % 4][:, None, None]
        map_NDHW[n, :, 7, 7] = kind_8D[6]
        for thing in (4, 5):
            y, x = torch.randint(7, (2,), generator=generator).tolist()
            while thing == 5 and 8 * y + x == place[4][n]:
                y, x = torch.randint(7, (2,), generator=generator).tolist()
            place[thing].append(8 * y + x)
            if thing == 4 or n % 5:
                map_NDHW[n, :, y, x] = kind_8D[thing] + (0.3 if n % 2 else -0.3) * kind_8D[7]
    map_NDHW += 0.02 * torch.randn(map_NDHW.shape, generator=generator)
    backbone = tiny_model([2, 2]).backbone
    backbone.channels, backbone.map_size = 8, (8, 8)
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
    centre_MD = k_means(heap_SD, 5, seed=0)
    order_M = centre_MD.argmax(1)
    assert sorted(order_M.tolist()) == [0, 1, 2, 3, 4]
    torch.testing.assert_close(centre_MD[order_M.argsort()], heap_SD.unflatten(0, (5, 30)).mean(1))
