"""Prototypes read off a baseline, and what keeps them honest while the network goes on to change."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import random_images, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from likethat.inference.passes import score_images
from likethat.inference.source_image import leave_source_out
from likethat.models.baseline import BaselineClassifier
from likethat.training import choose
from likethat.training.choose import candidate_count, embed_sources, spread_choice, start_from_baseline
from likethat.training.project import project

NAMES = ("a", "b", "c")
DEFAULT = {"similarity": "cosine", "add_on": "linear", "latent_width": 8}


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
    source = start_from_baseline(model, baseline, images, 0.2)
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


def test_only_patches_with_the_strongest_evidence_are_chosen() -> None:
    """Each chosen patch is among those of its image with the highest log-probability of the class, patch by patch."""
    model = tiny_model([2, 2, 2], **DEFAULT)
    images = random_images(12, 3)
    baseline = BaselineClassifier(model.backbone, 3).eval()
    torch.nn.init.normal_(baseline.head.weight)
    count = candidate_count(model, images, 0.2)
    assert count == 2  # a fifth of 9 patches
    source = start_from_baseline(model, baseline, images, 0.2)
    with torch.no_grad():
        feature = baseline.backbone(images.batch(torch.arange(12))[0])
    for p in range(6):
        n = int(source.image_P[p])
        evidence = []
        for row in range(3):
            for column in range(3):
                logits = baseline.head(feature[n, :, row, column]).detach()
                evidence.append((float(logits.log_softmax(0)[images.label_N[n]]), row, column))
        best = [(row, column) for _, row, column in sorted(evidence, reverse=True)[:count]]
        assert (int(source.row_P[p]), int(source.column_P[p])) in best


def test_candidates_that_do_not_fit_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for all candidates, for those of two classes, and of one class at a time: the same choice."""
    images = random_images(70, 3)
    torch.manual_seed(0)
    model = tiny_model([3, 2, 4], **DEFAULT)
    baseline = BaselineClassifier(model.backbone, 3)
    torch.nn.init.normal_(baseline.head.weight)
    found = []
    for most in (2**29, 4 * 8 * 2 * 48, 4 * 8 * 2 * 24):  # bytes of eight numbers for each of an image's two patches
        monkeypatch.setattr(choose, "MOST_BYTES", most)
        source = start_from_baseline(model, baseline, images, 0.2)
        found.append((source, model.prototype_layer.vectors().detach().clone(), model.last_layer.weight.clone()))
    for source, vector_PD, weight_KP in found[1:]:
        for name, value in vars(found[0][0]).items():
            assert torch.equal(vars(source)[name], value), name
        torch.testing.assert_close(vector_PD, found[0][1], rtol=1e-4, atol=1e-5)
        assert torch.equal(weight_KP, found[0][2])


def test_a_class_with_too_many_candidates_offers_the_strongest(monkeypatch: pytest.MonkeyPatch) -> None:
    images = random_images(21, 3)
    images.label_N[:] = torch.tensor([0] * 15 + [1] * 3 + [2] * 3)
    model = tiny_model([5, 1, 1], **DEFAULT)
    baseline = BaselineClassifier(model.backbone, 3).eval()
    torch.nn.init.normal_(baseline.head.weight)
    monkeypatch.setattr(choose, "MOST_BYTES", 4 * 8 * 7)
    source = start_from_baseline(model, baseline, images, 0.4)  # four patches an image
    with torch.no_grad():
        feature = baseline.backbone(images.batch(torch.arange(21))[0])
        evidence = baseline.head(feature[:15].flatten(2).transpose(1, 2)).log_softmax(2)[..., 0]
    strongest = [
        (n, place) for n in range(15) for place in evidence[n].topk(4).indices.tolist()
    ]  # of each image, and then of all of them
    strongest = sorted(strongest, key=lambda patch: -float(evidence[patch]))[:7]
    chosen = zip(source.image_P[:5].tolist(), (3 * source.row_P + source.column_P)[:5].tolist(), strict=True)
    assert set(chosen) <= set(strongest)
    assert len({*zip(source.image_P.tolist(), source.row_P.tolist(), source.column_P.tolist(), strict=True)}) == 7


def test_the_scale_is_the_best_by_the_definition() -> None:
    """Cross entropy of all images at once, no image looking at a prototype cut from it."""
    images = random_images(70, 3)
    model = tiny_model([3, 2, 4], **DEFAULT)
    source = start_from_baseline(model, BaselineClassifier(model.backbone, 3), images, 0.2)
    own_KP = model.own_KP
    score_NP = leave_source_out(score_images(model, images), torch.arange(70)[:, None], source.image_P, own_KP)
    logits_NK = score_NP @ (own_KP / own_KP.sum(1, keepdim=True)).T
    entropy = [
        float(torch.nn.functional.cross_entropy(scale * logits_NK, images.label_N, label_smoothing=choose.SMOOTHING))
        for scale in choose.SCALES
    ]
    best = choose.SCALES[entropy.index(min(entropy))]
    assert float(model.last_layer.weight.detach().max()) == pytest.approx(best / 3)  # prototypes a class, on average


def test_few_images_offer_more_patches_each() -> None:
    model = tiny_model([6, 6], **DEFAULT)
    assert candidate_count(model, random_images(4, 2), 0.2) == 3  # 2 images a class for 6 prototypes


def test_spread_choice_takes_one_of_each_heap() -> None:
    heaps = torch.eye(4).repeat_interleave(25, 0) + 0.01 * torch.randn(100, 4)
    chosen = spread_choice(heaps, torch.rand(100), 4)
    assert sorted((chosen // 25).tolist()) == [0, 1, 2, 3]
    assert len(set(spread_choice(torch.ones(10, 3), torch.rand(10), 6).tolist())) == 6, "equal candidates, no repeats"


def test_tied_prototypes_follow_the_network_and_projection_leaves_them() -> None:
    model = tiny_model([3, 3, 3], **DEFAULT)
    images = random_images(15, 3)
    source = start_from_baseline(model, BaselineClassifier(model.backbone, 3), images, 0.2)
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.mul_(1.05)
    before = model.prototype_layer.vectors().detach().clone()
    model.train()
    embed_sources(model, images, source)
    assert model.training, "embedding must not leave the model in another mode"
    assert not torch.allclose(model.prototype_layer.vectors(), before, atol=1e-4)
    projection = project(model, images, NAMES)
    assert float(projection.moved_P.max()) < 1e-5
    assert torch.equal(projection.image_P, source.image_P)
    assert torch.equal(projection.row_P, source.row_P)
    assert torch.equal(projection.column_P, source.column_P)
