"""The costs that are not in the paper, against loops."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.tiny import tiny_model

from likethat.models.protopnet import ProtoPNet
from likethat.training.batches import Shown
from likethat.training.losses import (
    BOUND,
    EVERY,
    LEAST,
    TEMPERATURE,
    UNCHANGED,
    context_cost,
    locality_cost,
    own_similarities,
    place_cost,
)


def test_locality_cost_is_that_of_the_loops() -> None:
    generator = torch.Generator().manual_seed(2)
    z_BDHW = torch.randn(5, 3, 4, 4, generator=generator)
    same_BHW = torch.rand(5, 4, 4, generator=generator) < 0.4
    same_BHW[2] = False
    total = 0.0
    for b in range(5):
        away = [
            1 - float(torch.cosine_similarity(z_BDHW[b, :, y, x], z_BDHW[b - 1, :, y, x], dim=0))
            for y in range(4)
            for x in range(4)
            if same_BHW[b, y, x]
        ]
        total += sum(away) / max(1, len(away))
    assert float(locality_cost(z_BDHW, same_BHW)) == pytest.approx(total / 5, rel=1e-5)


def test_place_cost_is_that_of_the_loops_and_pulls_maps_onto_their_parts() -> None:
    generator = torch.Generator().manual_seed(4)
    map_BVmHW = torch.rand(3, 2, 2, 3, 3, generator=generator).requires_grad_()
    part_BVmHW = torch.rand(3, 2, 2, 3, 3, generator=generator) < 0.3
    part_BVmHW[1, 0] = False
    total = 0.0
    for b in range(3):
        for v in range(2):
            for m in range(2):
                weight = {
                    (y, x): math.exp(float(map_BVmHW[b, v, m, y, x].detach()) / TEMPERATURE)
                    for y in range(3)
                    for x in range(3)
                }
                on_part = sum(weight[cell] for cell in weight if part_BVmHW[b, v, m][cell])
                total -= math.log(on_part / sum(weight.values())) if on_part else 0.0
    cost = place_cost(map_BVmHW, part_BVmHW)
    assert float(cost.detach()) == pytest.approx(total / 6, rel=1e-5)
    (gradient,) = torch.autograd.grad(cost, map_BVmHW)
    seen = part_BVmHW.flatten(3).any(3)
    assert (gradient[seen][part_BVmHW[seen]] <= 0).all()
    assert (gradient[~seen] == 0).all()
    assert gradient.isfinite().all()


def test_maps_of_the_own_classes_are_those_of_the_forward_pass() -> None:
    model = tiny_model([2, 2, 2], similarity="cosine", add_on="linear").eval()
    x_B3HW, label_BV = torch.rand(4, 3, 96, 96), torch.tensor([[0, 1], [1, 1], [2, 0], [0, 2]])
    with torch.no_grad():
        z_BDHW = model.latent(x_B3HW)
        cosine_BPHW = 1 - model.head(z_BDHW).distance_BPHW / 2
        found = own_similarities(model, z_BDHW, label_BV)
    for b, labels in enumerate(label_BV.tolist()):
        for v, label in enumerate(labels):
            torch.testing.assert_close(found[b, v], cosine_BPHW[b, 2 * label : 2 * label + 2], atol=1e-5, rtol=0)


def model_of_patches(counts: list[int]) -> tuple[ProtoPNet, Shown]:
    """A network whose prototypes are patches of some pictures, and a batch of others."""
    torch.manual_seed(3)
    model = tiny_model(counts, similarity="cosine", add_on="linear").eval()
    x_B3HW, label_B = torch.rand(10, 3, 96, 96), torch.arange(10) % len(counts)
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))  # so that pictures differ to it
        patch_SD = (
            model.prototype_layer.patches(model.latent(torch.rand(10, 3, 96, 96))).permute(0, 2, 3, 1).flatten(0, 2)
        )
        model.prototype_layer.prototype_PDhw.copy_(
            patch_SD[torch.randperm(len(patch_SD))[: sum(counts)], :, None, None]
        )
    nothing = torch.zeros(10, 1, 1)
    return model, Shown(x_B3HW, label_B[:, None], nothing, nothing, torch.arange(10), nothing, nothing)


def test_context_cost_is_that_of_the_loops() -> None:
    model, batch = model_of_patches([3, 2, 3])
    with torch.no_grad():
        cosine_BPHW = 1 - model(batch.x_B3HW).distance_BPHW / 2
    first, lost = [0, 3, 5], {}
    for turn in range(0, 10, EVERY):
        x_13HW, label, number = batch.x_B3HW[turn : turn + 1], int(batch.label_BV[turn, 0]), turn // EVERY
        own = list(range(first[label], first[label] + model.prototypes_of_class[label]))
        best = max(own, key=lambda p: float(cosine_BPHW[turn, p].max()))
        chosen = best if number % 2 == 0 else first[label] + number // 2 % 3
        assert chosen in own
        map_HW = cosine_BPHW[turn, chosen]
        row, column = divmod(int(map_HW.argmax()), map_HW.shape[1])
        pixel_13HW = x_13HW.clone().requires_grad_()
        (1 - model(pixel_13HW).distance_BPHW[0, chosen, row, column] / 2).backward()
        assert pixel_13HW.grad is not None
        changed_13HW = x_13HW.clone()
        for y in range(96):
            for x in range(96):
                away_y = abs((2 * y + 1) / 96 - (2 * row + 1) / map_HW.shape[0])
                away_x = abs((2 * x + 1) / 96 - (2 * column + 1) / map_HW.shape[1])
                if max(away_y, away_x) > UNCHANGED:
                    changed_13HW[0, :, y, x] -= BOUND * pixel_13HW.grad[0, :, y, x].sign()
        with torch.no_grad():
            after = 1 - float(model(changed_13HW).distance_BPHW[0, chosen, row, column]) / 2
        assert float(map_HW[row, column]) > LEAST
        lost[turn] = max(0.0, 1 - after / float(map_HW[row, column]))
    assert max(lost.values()) > 1e-3, "the changes changed nothing"
    z_BDHW = model.latent(batch.x_B3HW).detach().requires_grad_()
    cost = context_cost(model, z_BDHW, batch)
    assert float(cost.detach()) == pytest.approx(sum(lost.values()) * EVERY / 10, rel=1e-3)
    cost.backward()
    assert z_BDHW.grad is None, "patches would do well to be less like prototypes where nothing has changed"
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.backbone.parameters())


def test_context_cost_takes_nothing_where_a_class_lacks_the_prototype_whose_turn_it_is() -> None:
    model, batch = model_of_patches([1, 3])
    twelfth = batch._replace(turn_B=torch.full((10,), 3 * EVERY))  # the second of a class, and all are attacked
    mine = Shown(*(value[batch.label_BV[:, 0] == 0] for value in twelfth[:7]))
    assert float(context_cost(model, model.latent(mine.x_B3HW), mine).detach()) == 0
    mine = Shown(*(value[batch.label_BV[:, 0] == 1] for value in twelfth[:7]))
    assert float(context_cost(model, model.latent(mine.x_B3HW), mine).detach()) > 0
