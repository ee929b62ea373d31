"""The search for nearest patches against a plain loop over every patch of every image."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import random_images, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from likethat.data.loaders import Images
from likethat.inference import passes
from likethat.inference.nearest import Search, nearest_patches
from likethat.models.protopnet import ProtoPNet


@torch.no_grad()
def slow(model: ProtoPNet, images: Images, k: int) -> list[list[tuple[float, int, int, int]]]:
    """Of each prototype: distance, image, row and column of the best patch of each image, the k best images."""
    model.eval()
    layer = model.prototype_layer
    found: list[list[tuple[float, int, int, int]]] = [[] for _ in layer.class_P]
    for number in range(len(images)):
        x_13HW, _ = images.batch(torch.tensor([number]))
        patch_DHW = layer.patches(model.latent(x_13HW))[0].double()
        for p, vector_D in enumerate(layer.vectors().double()):
            distance_HW = (patch_DHW - vector_D[:, None, None]).square().sum(0)
            places = [
                (float(distance_HW[row, column]), number, row, column)
                for row in range(distance_HW.shape[0])
                for column in range(distance_HW.shape[1])
            ]
            found[p].append(min(places))
    return [sorted(entries)[:k] for entries in found]


@pytest.mark.parametrize("options", [{}, {"prototype_shape": "2x2"}, {"similarity": "cosine"}])
@pytest.mark.parametrize(("images", "k"), [(11, 4), (3, 5)])
def test_equals_a_plain_loop(images: int, k: int, options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "EVAL_BATCH", 4)  # several batches, the last one smaller
    model = tiny_model([3, 1, 2], **options)
    pictures = random_images(images, 3)
    nearest = nearest_patches(model, pictures, k)
    expected = slow(model, pictures, k)
    columns = zip(nearest.distance_Pk, nearest.image_Pk, nearest.row_Pk, nearest.column_Pk, strict=True)
    for p, (distance_k, image_k, row_k, column_k) in enumerate(columns):
        places = list(zip(image_k.tolist(), row_k.tolist(), column_k.tolist(), strict=True))
        assert places == [entry[1:] for entry in expected[p]]
        assert distance_k.tolist() == pytest.approx([entry[0] for entry in expected[p]], rel=1e-3, abs=1e-4)
        for distance, (_, row, column), map_HW in zip(distance_k, places, nearest.map_PkHW[p], strict=True):
            assert map_HW.shape == model.patch_grid
            assert map_HW[row, column] == distance == map_HW.min()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), k=st.integers(1, 5), batches=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_ties_go_to_the_earlier_image_and_place(data: st.DataObject, k: int, batches: list[int]) -> None:
    """Distances of few values, so that most of them are equal, in batches of any size."""
    model = tiny_model([1, 1])
    shape = (sum(batches), 2, *model.patch_grid)
    count = torch.Size(shape).numel()
    values = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    distance_NPHW = torch.tensor(values).view(shape).float()
    search = Search(model, k)
    for index_B in torch.arange(shape[0]).split(batches):
        search.offer(index_B, distance_NPHW[index_B])
    nearest = search.found()
    width = model.patch_grid[1]
    for p in range(2):
        flat = distance_NPHW[:, p].flatten(1).tolist()
        ranked = sorted((min(places), number, places.index(min(places))) for number, places in enumerate(flat))[:k]
        assert nearest.distance_Pk[p].tolist() == [entry[0] for entry in ranked]
        assert nearest.image_Pk[p].tolist() == [entry[1] for entry in ranked]
        assert (nearest.row_Pk[p] * width + nearest.column_Pk[p]).tolist() == [entry[2] for entry in ranked]


@pytest.mark.parametrize("options", [{}, {"prototype_shape": "2x2"}, {"similarity": "cosine"}])
@pytest.mark.parametrize("most", [1, 40, 150])
def test_a_few_prototypes_at_a_time_find_the_same(
    most: int, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bound on the distances in memory that asks for one, some or most prototypes at a time."""
    model, pictures = tiny_model([3, 1, 3], **options), random_images(9, 3)
    layer = model.prototype_layer
    z_BDHW = model.eval().latent(pictures.batch(torch.arange(2))[0])
    blocks = [maps.distances() for _, maps in layer.in_blocks(z_BDHW, most)]
    assert all(distance_BpHW.numel() <= max(most, z_BDHW[:, 0].numel()) for distance_BpHW in blocks)
    torch.testing.assert_close(torch.cat(blocks, 1), layer(z_BDHW).distances(), rtol=1e-5, atol=1e-5)
    expected = nearest_patches(model, pictures, 4)
    monkeypatch.setattr(type(layer).in_blocks, "__defaults__", (most,))
    found = nearest_patches(model, pictures, 4)
    assert torch.equal(found.image_Pk, expected.image_Pk)
    assert torch.equal(found.row_Pk, expected.row_Pk)
    assert torch.equal(found.column_Pk, expected.column_Pk)
    torch.testing.assert_close(found.distance_Pk, expected.distance_Pk, rtol=1e-5, atol=1e-5)


def test_the_search_leaves_the_model_alone() -> None:
    model = tiny_model([2, 2])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    nearest_patches(model, random_images(6, 2), 2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
