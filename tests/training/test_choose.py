"""Prototypes read off a baseline, and what keeps them honest while the network goes on to change."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import random_images, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from likethat.inference.feature_maps import keep_feature_maps
from likethat.inference.passes import score_images
from likethat.inference.source_image import leave_source_out
from likethat.models.baseline import BaselineClassifier
from likethat.training import choose
from likethat.training.choose import start_from_baseline
from likethat.training.parts import Parts
from likethat.training.project import project

NAMES = ("a", "b", "c")
DEFAULT = {"similarity": "cosine", "add_on": "linear", "latent_width": 8}


def some_parts(images: int, parts: int) -> Parts:
    """Return places of parts in 3x3 maps, most of them shown, all in other places in one image."""
    generator = torch.Generator().manual_seed(images)
    place_Nm = torch.stack([torch.randperm(9, generator=generator)[:parts] for _ in range(images)])
    return Parts(place_Nm, torch.rand(images, parts, generator=generator) < 0.8)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_leaving_the_source_out_is_the_mean_of_the_class_mates(seed: int, counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    class_P = [k for k, count in enumerate(counts) for _ in range(count)]
    own_KP = torch.arange(len(counts))[:, None] == torch.tensor(class_P)
    source_P = torch.randint(3, (len(class_P),), generator=generator)
    score_BP = torch.rand(4, len(class_P), generator=generator)
    image_BV = torch.tensor([[0, 0], [1, 1], [2, 0], [7, 1]])
    got = leave_source_out(score_BP, image_BV, source_P, own_KP)
    for b, shown in enumerate(image_BV.tolist()):
        for p, k in enumerate(class_P):
            mates = [
                float(score_BP[b, q]) for q, other in enumerate(class_P) if other == k and int(source_P[q]) not in shown
            ]
            cut_from_it = int(source_P[p]) in shown
            wanted = sum(mates) / len(mates) if cut_from_it and mates else float(score_BP[b, p])
            assert float(got[b, p]) == pytest.approx(wanted, abs=1e-6)


def test_chosen_prototypes_are_patches_of_their_class() -> None:
    model = tiny_model([3, 2, 4], **DEFAULT)
    images = random_images(20, 3)
    baseline = BaselineClassifier(model.backbone, 3)
    source = start_from_baseline(model, baseline, images, some_parts(20, 4))
    class_P = model.prototype_layer.class_P
    assert torch.equal(images.label_N[source.image_P], class_P)
    with torch.no_grad():
        patch = model.prototype_layer.patches(model.eval().latent(images.batch(torch.arange(20))[0]))
    for p in range(9):
        vector = patch[source.image_P[p], :, source.row_P[p], source.column_P[p]]
        assert torch.allclose(model.prototype_layer.vectors()[p], vector, atol=1e-5)
    places = {(int(i), int(r), int(c)) for i, r, c in zip(source.image_P, source.row_P, source.column_P, strict=True)}
    assert len(places) == 9
    weight = model.last_layer.weight.detach()
    assert (weight[~model.own_KP] == 0).all()
    assert (weight[model.own_KP] > 0).all()


def test_the_patch_of_a_part_is_the_most_typical_of_its_class() -> None:
    """Farthest from what is ordinary, the part's mean and that of all cells, towards the class's mean, among the images
    that show the part."""
    model, images = tiny_model([2, 2, 2], **DEFAULT), random_images(24, 3)
    parts = some_parts(24, 2)
    source = start_from_baseline(model, BaselineClassifier(model.backbone, 3), images, parts)
    with torch.no_grad():
        patch_NDS = model.prototype_layer.patches(model.latent(images.batch(torch.arange(24))[0])).flatten(2)
    of_all_cells = sum(patch_NDS[n, :, place] for n in range(24) for place in range(9)) / (24 * 9)
    for p, label in enumerate([0, 0, 1, 1, 2, 2]):
        part = p % 2
        vectors = {n: patch_NDS[n, :, parts.place_Nm[n, part]] for n in range(24)}
        shown = [n for n in range(24) if parts.shown_Nm[n, part]]
        everywhere = sum(vectors[n] for n in shown) / len(shown)
        rows = [n for n in range(24) if n % 3 == label]
        weight = {n: float(parts.shown_Nm[n, part]) + 1e-3 for n in rows}
        own = sum(weight[n] * vectors[n] for n in rows) / sum(weight.values())
        towards = own - everywhere - choose.COMMON * of_all_cells
        best = max((n for n in rows if n in shown), key=lambda n: float(vectors[n] @ towards))
        assert int(source.image_P[p]) == best
        assert int(3 * source.row_P[p] + source.column_P[p]) == int(parts.place_Nm[best, part])


@pytest.mark.parametrize("add_on_start", ["pca", "lda"])
def test_no_two_prototypes_are_one_patch_where_images_are_few(add_on_start: str) -> None:
    """Two images a class, of nine patches each, for nine prototypes that are all looked for in the same places."""
    model, images = tiny_model([9, 9], **DEFAULT), random_images(4, 2)
    parts = Parts(torch.zeros(4, 9, dtype=torch.long), torch.zeros(4, 9, dtype=torch.bool))
    source = start_from_baseline(model, BaselineClassifier(model.backbone, 2), images, parts, add_on_start)
    assert torch.equal(images.label_N[source.image_P], model.prototype_layer.class_P)
    patches = zip(source.image_P.tolist(), source.row_P.tolist(), source.column_P.tolist(), strict=True)
    assert len(set(patches)) == 18


@pytest.mark.parametrize("add_on_start", ["pca", "lda"])
def test_patches_that_do_not_fit_and_kept_maps_give_the_same_choice(
    add_on_start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for the patches of all classes, of two, and of one class at a time, from pictures and from maps."""
    images = random_images(70, 3)
    torch.manual_seed(0)
    model = tiny_model([3, 2, 4], **DEFAULT)
    baseline = BaselineClassifier(model.backbone, 3).eval()
    maps = keep_feature_maps(baseline.backbone, images, torch.arange(70))
    found = []
    for seen in (images, maps):
        for most in (2**29, 4 * 8 * 4 * 48, 4 * 8 * 4 * 24):  # bytes of eight numbers for each of an image's patches
            monkeypatch.setattr(choose, "MOST_BYTES", most)
            source = start_from_baseline(model, baseline, seen, some_parts(70, 4), add_on_start)
            found.append((source, model.prototype_layer.vectors().detach().clone(), model.last_layer.weight.clone()))
    for source, vector_PD, weight_KP in found[1:]:
        for name, value in vars(found[0][0]).items():
            assert torch.equal(vars(source)[name], value), name
        torch.testing.assert_close(vector_PD, found[0][1], rtol=1e-4, atol=1e-5)
        assert torch.equal(weight_KP, found[0][2])


def test_the_scale_is_the_best_by_the_definition() -> None:
    """Cross entropy of all images at once, no image looking at a prototype cut from it."""
    images = random_images(70, 3)
    model = tiny_model([3, 2, 4], **DEFAULT)
    source = start_from_baseline(model, BaselineClassifier(model.backbone, 3), images, some_parts(len(images), 4))
    own_KP = model.own_KP
    score_NP = leave_source_out(score_images(model, images), torch.arange(70)[:, None], source.image_P, own_KP)
    logits_NK = score_NP @ (own_KP / own_KP.sum(1, keepdim=True)).T
    entropy = [
        float(torch.nn.functional.cross_entropy(scale * logits_NK, images.label_N, label_smoothing=choose.SMOOTHING))
        for scale in choose.SCALES
    ]
    best = choose.SCALES[entropy.index(min(entropy))]
    assert float(model.last_layer.weight.detach().max()) == pytest.approx(best / 3)  # prototypes a class, on average


def test_chosen_prototypes_are_patches_that_projection_leaves() -> None:
    model = tiny_model([3, 3, 3], **DEFAULT)
    images = random_images(15, 3)
    source = start_from_baseline(model, BaselineClassifier(model.backbone, 3), images, some_parts(len(images), 4))
    projection = project(model, images, NAMES)
    assert float(projection.moved_P.max()) < 1e-5
    assert torch.equal(projection.image_P, source.image_P)
    assert torch.equal(projection.row_P, source.row_P)
    assert torch.equal(projection.column_P, source.column_P)
