"""The costs that are not in the paper, against loops."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.tiny import tiny_model

from likethat.training.losses import TEMPERATURE, locality_cost, own_similarities, place_cost


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
