"""The part in which a class differs from the class most like it."""

from __future__ import annotations

from functools import partial

import torch
from helpers.tiny import tiny_model
from torch.nn.functional import normalize

from likethat.inference.feature_maps import FeatureMaps
from likethat.training.parts import Parts, mean_looks, most_alike, nearest_part, unlikeness, with_decisive_parts

CELLS = [(y, x) for y in range(4) for x in range(5)]


def test_unlikeness_is_that_of_the_loops() -> None:
    generator = torch.Generator().manual_seed(3)
    patch_DHW = normalize(torch.randn(6, 4, 5, generator=generator), dim=0)
    other_oDHW = normalize(torch.randn(3, 6, 4, 5, generator=generator), dim=1)
    unlike = {}
    for y, x in CELLS:
        best = [max(float(patch_DHW[:, y, x] @ other_DHW[:, v, u]) for v, u in CELLS) for other_DHW in other_oDHW]
        unlike[y, x] = 1 - sum(best) / len(best)
    found_HW = unlikeness(patch_DHW, other_oDHW)
    for y, x in CELLS:
        around = [value for (v, u), value in unlike.items() if abs(v - y) <= 1 and abs(u - x) <= 1]
        torch.testing.assert_close(float(found_HW[y, x]), sum(around) / len(around), atol=1e-6, rtol=0)


def test_classes_are_compared_by_the_mean_patches_of_their_parts() -> None:
    """An image that does not show a part says nothing of it."""
    patch_nDHW = torch.zeros(3, 2, 1, 2)
    patch_nDHW[:, 0, 0, 0] = torch.tensor([1.0, 3.0, 50.0])
    patch_nDHW[:, 1, 0, 1] = torch.tensor([2.0, 4.0, 6.0])
    parts = Parts(torch.tensor([[0, 1]] * 3), torch.tensor([[True, True], [True, True], [False, True]]))
    assert mean_looks(patch_nDHW, parts).tolist() == [[2.0, 0.0], [0.0, 4.0]]
    mean_KmD = torch.tensor([[[0.0], [0.0]], [[0.0], [3.0]], [[1.0], [1.0]], [[9.0], [9.0]]])
    assert most_alike(mean_KmD).tolist() == [2, 2, 0, 1]


def test_the_part_nearest_to_the_decisive_one_gives_way() -> None:
    """Distances are means over images that show a part; one that none shows is not near."""
    place_n = torch.tensor([6, 6])  # row 1, column 1 of five
    parts = Parts(torch.tensor([[8, 7, 6], [8, 19, 6]]), torch.tensor([[True, True, False], [True, False, False]]))
    assert nearest_part(place_n, parts, width=5) == 1


def test_twins_are_given_the_thing_in_which_they_differ() -> None:
    """Four classes in two pairs. All show things 0 and 1, which tell the pairs apart; things 2 and 3 lie beside them,
    and the first pair differs in 2 alone, the second in 3 alone."""
    generator = torch.Generator().manual_seed(4)
    look_16D, label_N = torch.eye(16), torch.arange(32) % 4
    map_NDHW = look_16D[12 + torch.randint(4, (32, 15, 15), generator=generator)].permute(0, 3, 1, 2).clone()
    place_N4 = torch.zeros(32, 4, dtype=torch.long)
    for n, label in enumerate(label_N.tolist()):
        pair, second = divmod(label, 2)
        kinds = (pair, 2 + pair, 4 + (second if pair == 0 else 0), 6 + (second if pair == 1 else 0))
        y, x = torch.randint(2, 6, (2,), generator=generator).tolist()
        for thing, (row, column) in enumerate(((y, x), (y + 7, x), (y, x + 3), (y + 7, x + 3))):
            map_NDHW[n, :, row - 1 : row + 2, column - 1 : column + 2] = look_16D[kinds[thing]][:, None, None]
            place_N4[n, thing] = 15 * row + column
    map_NDHW += 0.02 * torch.randn(map_NDHW.shape, generator=generator)
    backbone = tiny_model([2, 2, 2, 2]).backbone
    backbone.channels, backbone.map_size = 16, (15, 15)
    found = Parts(place_N4[:, :2], torch.ones(32, 2, dtype=torch.bool))
    maps = FeatureMaps(map_NDHW, label_N, torch.device("cpu"))
    to_patches = partial(normalize, dim=1)
    decisive = with_decisive_parts(backbone, maps, to_patches, found, [2] * 4)
    true_Nm = torch.where(label_N[:, None] < 2, place_N4[:, [2, 1]], place_N4[:, [0, 3]])
    assert torch.equal(decisive.place_Nm, true_Nm)
    assert decisive.shown_Nm.all()
    decisive = with_decisive_parts(backbone, maps, to_patches, found, [2, 2, 1, 2])
    assert torch.equal(decisive.place_Nm[label_N == 2], place_N4[label_N == 2][:, [3, 1]]), (
        "in the place of one it uses"
    )
    assert torch.equal(decisive.place_Nm[label_N != 2], true_Nm[label_N != 2])
