"""Several heads on one pass, and logits of scores that were kept from it."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import random_images, tiny_model

from likethat.inference import passes
from likethat.inference.passes import classify_images, latents_of, logits_by, logits_of_kept, own_batches_of


def test_heads_share_a_pass_and_kept_scores_give_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "EVAL_BATCH", 4)  # several batches, the last one smaller
    model, images = tiny_model([2, 3, 1]).eval(), random_images(10, 3)
    layer, weight_KP = model.prototype_layer, model.last_layer.weight.detach()
    layer.unprojected_PDhw.copy_(torch.rand_like(layer.prototype_PDhw))
    before = layer.before_projection()
    kept_NP = torch.zeros(len(images), 6)
    heads = [(layer, weight_KP), (before, weight_KP), (layer, 2 * weight_KP)]
    latents = latents_of(model, own_batches_of(images))
    plain_NK, before_NK, double_NK = logits_by(heads, latents, len(images), images.device, kept_NP)
    with torch.no_grad():
        z_NDHW = model.latent(images.batch(torch.arange(10))[0])
        score_NP, before_NP = (
            one.similarity.of_distance(one(z_NDHW).distances().amin((2, 3))) for one in (layer, before)
        )
    torch.testing.assert_close(kept_NP, score_NP)
    torch.testing.assert_close(plain_NK, score_NP @ weight_KP.T)
    torch.testing.assert_close(before_NK, before_NP @ weight_KP.T)
    torch.testing.assert_close(double_NK, 2 * plain_NK)
    assert torch.equal(logits_of_kept(kept_NP, weight_KP), classify_images(model, images))


def test_one_picture_of_an_output_is_that_of_a_pass_of_its_own() -> None:
    model, images = tiny_model([2, 2]).eval(), random_images(5, 2)
    x_B3HW, _ = images.batch(torch.arange(5))
    with torch.no_grad():
        one, alone = model(x_B3HW).one(3), model(x_B3HW[3:4])
    for name in ("logits_BK", "score_BP", "min_distance_BP", "distance_BPHW", "similarity_BPHW"):
        torch.testing.assert_close(getattr(one, name), getattr(alone, name))
