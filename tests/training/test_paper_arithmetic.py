"""The `paper` preset against the published arithmetic, spelled out number by number.

Distances with windows and other similarities are in test_models.py, projection that must share patches in
test_training.py, the last layer's optimum in test_last_layer.py, pruned run folders in test_prune.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers.tiny import random_images, tiny_model
from torch import Tensor, nn

from likethat.config.presets import resolve
from likethat.data.loaders import Images
from likethat.inference.nearest import nearest_patches
from likethat.models.protopnet import ProtoPNet
from likethat.training.last_layer import solve_last_layer
from likethat.training.losses import protopnet_costs
from likethat.training.plan import PlanEntry, set_learning_rates, start_stage
from likethat.training.project import project
from likethat.training.pruning.prune import NEAREST, THRESHOLD, own_neighbours, prototypes_to_keep

CLASSES = [0, 0, 1, 2, 2, 2]  # of the prototypes


@pytest.fixture
def model() -> ProtoPNet:
    return tiny_model([2, 1, 3]).eval()


@torch.no_grad()
def latents(model: ProtoPNet, images: Images) -> Tensor:
    """Every image by itself."""
    return torch.cat([model.latent(images.batch(torch.tensor([n]))[0]) for n in range(len(images))]).double()


def distances(z_NDHW: Tensor, prototype_PD: Tensor) -> list[list[list[float]]]:
    """Of each image and prototype, the squared distance to each patch, row by row."""
    return [
        [
            [
                sum((a - b) ** 2 for a, b in zip(z_DHW[:, row, column].tolist(), prototype_D, strict=True))
                for row in range(z_DHW.shape[1])
                for column in range(z_DHW.shape[2])
            ]
            for prototype_D in prototype_PD.double().tolist()
        ]
        for z_DHW in z_NDHW
    ]


def test_forward_pass(model: ProtoPNet) -> None:
    """From the backbone's map on: two 1x1 convolutions with ReLU and sigmoid, distances, similarities, maximum, last
    layer."""
    x = torch.rand(2, 3, 96, 96)
    first, second = (layer for layer in model.add_on if isinstance(layer, nn.Conv2d))
    assert [type(layer).__name__ for layer in model.add_on] == ["Conv2d", "ReLU", "Conv2d", "Sigmoid"]
    with torch.no_grad():
        output, feature_BCHW = model(x), model.backbone(x).double()
    prototypes = model.prototype_layer.prototype_PDhw[:, :, 0, 0].tolist()
    for b in range(2):
        scores = [-math.inf] * 6
        for row in range(3):
            for column in range(3):
                patch = feature_BCHW[b, :, row, column].tolist()
                hidden = [max(0.0, value) for value in _dense(patch, first)]
                latent = [1 / (1 + math.exp(-value)) for value in _dense(hidden, second)]
                for p, prototype in enumerate(prototypes):
                    d = sum((a - b) ** 2 for a, b in zip(latent, prototype, strict=True))
                    assert float(output.distance_BPHW[b, p, row, column]) == pytest.approx(d, abs=1e-5)
                    scores[p] = max(scores[p], math.log((d + 1) / (d + 1e-4)))
        assert output.score_BP[b].tolist() == pytest.approx(scores, abs=1e-4)
        for k in range(3):
            logit = sum(score if CLASSES[p] == k else -0.5 * score for p, score in enumerate(scores))
            assert float(output.logits_BK[b, k]) == pytest.approx(logit, abs=1e-4)


def _dense(values: list[float], layer: nn.Conv2d) -> list[float]:
    assert layer.kernel_size == (1, 1)
    assert layer.bias is not None
    weight_OI = layer.weight.detach()[:, :, 0, 0].double().tolist()
    return [
        sum(w * v for w, v in zip(row, values, strict=True)) + bias
        for row, bias in zip(weight_OI, layer.bias.tolist(), strict=True)
    ]


def authors_costs(model: ProtoPNet, min_distance_BP: Tensor, logits_BK: Tensor, labels: list[int]) -> dict[str, Tensor]:
    """In the authors' form: the nearest prototype is found as the largest distance there can be less its distance,
    with the others masked to zero."""
    largest = model.prototype_layer.prototype_PDhw[0].numel()
    cross_entropy = cluster = separation = torch.zeros(())
    for b, label in enumerate(labels):
        cross_entropy = cross_entropy - logits_BK[b].log_softmax(0)[label] / len(labels)
        mask = torch.tensor([float(k == label) for k in CLASSES])
        inverted = (largest - min_distance_BP[b]) * mask
        cluster = cluster + (largest - inverted.max()) / len(labels)
        inverted = (largest - min_distance_BP[b]) * (1 - mask)
        separation = separation + (largest - inverted.max()) / len(labels)
    weights = model.last_layer.weight.tolist()
    l1 = sum(abs(weights[k][p]) for k in range(3) for p in range(6) if CLASSES[p] != k)
    loss = cross_entropy + 0.8 * cluster - 0.08 * separation + 1e-4 * l1
    return {"cross_entropy": cross_entropy, "cluster": cluster, "separation": -separation, "loss": loss}


def test_costs_and_their_gradients(model: ProtoPNet) -> None:
    """The L1 term is constant while the last layer is fixed: it adds to the authors' loss and not to its gradient."""
    images = random_images(6, 3)
    x, labels = images.batch(torch.arange(6))
    moving = [model.prototype_layer.prototype_PDhw, *model.add_on.parameters()]
    output = model(x)
    ours = protopnet_costs(output, labels[:, None], torch.ones(len(labels), 1), model.own_KP, resolve("paper").train)
    theirs = authors_costs(model, output.min_distance_BP, output.logits_BK, labels.tolist())
    assert ours.keys() == theirs.keys()
    l1 = 1e-4 * 0.5 * 12  # -0.5 from each of six prototypes to two other classes
    for name, cost in ours.items():
        assert float(cost.detach()) + l1 * (name == "loss") == pytest.approx(float(theirs[name].detach()), rel=1e-6)
    gradients = torch.autograd.grad(ours["loss"], moving, retain_graph=True)
    for mine, wanted in zip(gradients, torch.autograd.grad(theirs["loss"], moving), strict=True):
        assert float(wanted.abs().max()) > 0
        assert torch.allclose(mine, wanted, rtol=1e-4, atol=1e-6)


def test_last_layer_minimises_cross_entropy_and_masked_l1(model: ProtoPNet) -> None:
    """The objective number by number, and that L1 is of the connections to other classes alone."""
    settings = resolve("paper").train
    images = random_images(12, 3)
    with torch.no_grad():
        score_NP = model(images.batch(torch.arange(12))[0]).score_BP
    start_KP = model.last_layer.weight.detach()
    class_P = model.prototype_layer.class_P
    solution = solve_last_layer(
        score_NP, images.label_N, class_P, 3, lam=settings.l1, ridge=settings.ridge, start_KP=start_KP
    )

    def objective(weight_KP: Tensor) -> float:
        value = 0.0
        for scores, label in zip(score_NP.double(), images.label_N.tolist(), strict=True):
            logits = [float((row * scores).sum()) for row in weight_KP.double()]
            value += (math.log(sum(math.exp(logit) for logit in logits)) - logits[label]) / 12
        for k in range(3):
            for p in range(6):
                weight = float(weight_KP[k, p])
                value += 1e-4 * abs(weight) * (CLASSES[p] != k)
                value += settings.ridge / 2 * (weight - (1.0 if CLASSES[p] == k else 0.0)) ** 2
        return value

    best = objective(solution.weight_KP)
    assert solution.objective == pytest.approx(best, rel=1e-5)
    assert best < objective(start_KP)
    for k in range(3):
        for p in range(6):
            for step in (1e-2, -1e-2):
                other_KP = solution.weight_KP.double().clone()
                other_KP[k, p] += step
                assert objective(other_KP) > best


def test_projection_takes_the_nearest_patch_of_the_own_class(model: ProtoPNet) -> None:
    """The authors' rule where no two prototypes want the same patch, as here."""
    images = random_images(13, 3)
    z_NDHW, before_PD = latents(model, images), model.prototype_layer.prototype_PDhw[:, :, 0, 0].detach().clone()
    distance_NPS = distances(z_NDHW, before_PD)
    wanted = []
    for p, k in enumerate(CLASSES):
        best = (math.inf, -1, -1)
        for n, label in enumerate(images.label_N.tolist()):
            for place, distance in enumerate(distance_NPS[n][p]):
                if label == k and distance < best[0]:
                    best = (distance, n, place)
        wanted.append(best[1:])
    assert len(set(wanted)) == len(wanted), "two prototypes want the same patch here: choose another seed"
    projection = project(model, images, ("a", "b", "c"))
    place_P = projection.row_P * 3 + projection.column_P
    assert list(zip(projection.image_P.tolist(), place_P.tolist(), strict=True)) == wanted
    after_PD = model.prototype_layer.prototype_PDhw[:, :, 0, 0].detach()
    for p, (n, place) in enumerate(wanted):
        assert after_PD[p].tolist() == pytest.approx(z_NDHW[n, :, place // 3, place % 3].tolist(), abs=1e-6)


def test_pruning_counts_the_own_class_among_the_six_nearest(model: ProtoPNet) -> None:
    """One patch of each image, images of all classes; fewer than three of the own class, and the prototype goes."""
    assert (NEAREST, THRESHOLD) == (6, 3)
    images = random_images(17, 3)
    project(model, images, ("a", "b", "c"))
    distance_NPS = distances(latents(model, images), model.prototype_layer.prototype_PDhw[:, :, 0, 0].detach())
    own = []
    for p, k in enumerate(CLASSES):
        nearest = sorted(range(17), key=lambda n: min(distance_NPS[n][p]))[:6]
        own.append(sum(int(images.label_N[n]) == k for n in nearest))
    assert min(own) < 3 <= max(own), "these images do not put the rule to the test: choose another seed"
    class_P = model.prototype_layer.class_P
    own_P = own_neighbours(nearest_patches(model, images, NEAREST).image_Pk, images.label_N, class_P)
    assert own_P.tolist() == own
    keep_p = prototypes_to_keep(own_P, class_P, ("a", "b", "c"), threshold=THRESHOLD, keep_one=True)
    kept = set(keep_p.tolist())
    for k in range(3):
        members = [p for p in range(6) if CLASSES[p] == k]
        passed = {p for p in members if own[p] >= 3}
        assert kept & set(members) == passed or (not passed and len(kept & set(members)) == 1)


def test_rates_of_every_part_follow_the_authors_schedule(model: ProtoPNet) -> None:
    """Theirs is torch's StepLR, stepped before each joint epoch; the warm stage has none."""
    settings = resolve("paper").train
    layer = model.prototype_layer
    parts = {"backbone": [*model.backbone.parameters()], "add_on": [*model.add_on.parameters()]}
    parts["prototypes"] = [layer.prototype_PDhw]
    theirs = torch.optim.Adam(
        [
            {"params": parts["backbone"], "lr": 1e-4, "weight_decay": 1e-3},
            {"params": parts["add_on"], "lr": 3e-3, "weight_decay": 1e-3},
            {"params": parts["prototypes"], "lr": 3e-3},
        ]
    )
    schedule = torch.optim.lr_scheduler.StepLR(theirs, step_size=5, gamma=0.1)
    warm = start_stage(model, None, "warm", settings)
    assert {id(p) for group in warm.param_groups for p in group["params"]} == {
        id(p) for name in ("add_on", "prototypes") for p in parts[name]
    }
    assert not any(parameter.requires_grad for parameter in parts["backbone"])
    set_learning_rates(warm, PlanEntry("warm", 0, 4), 0.5, settings)
    assert [group["lr"] for group in warm.param_groups] == [3e-3, 3e-3]
    ours = start_stage(model, None, "joint", settings)
    assert type(ours) is torch.optim.Adam
    for epoch in range(26):
        theirs.step()  # StepLR complains otherwise; there are no gradients
        schedule.step()
        set_learning_rates(ours, PlanEntry("joint", 0, epoch), 0.9, settings)
        for mine, wanted in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert [id(p) for p in mine["params"]] == [id(p) for p in wanted["params"]]
            assert mine["lr"] == pytest.approx(wanted["lr"], rel=1e-6)
            for setting in ("betas", "eps", "weight_decay"):
                assert mine[setting] == wanted[setting]


def test_initialisation() -> None:
    """Prototypes uniform in [0, 1]; add-on normal with variance 2 / fan-out, no bias; +1 and -0.5; ten a class."""
    config = resolve("paper", backbone="test_resnet", weights="none", input_size=96)
    assert config.model.prototypes_per_class == 10
    model = tiny_model([10] * 40, latent_width=128)
    prototype = model.prototype_layer.prototype_PDhw.detach()
    assert prototype.shape == (400, 128, 1, 1)
    assert 0 <= float(prototype.min()) < 1e-3
    assert 1 - 1e-3 < float(prototype.max()) <= 1
    assert float(prototype.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(prototype.var()) == pytest.approx(1 / 12, rel=0.02)
    for layer in (layer for layer in model.add_on if isinstance(layer, nn.Conv2d)):
        assert layer.out_channels == 128
        assert float(layer.weight.detach().var()) == pytest.approx(2 / 128, rel=0.05)
        assert float(layer.weight.detach().mean()) == pytest.approx(0, abs=0.01)
        assert layer.bias is not None
        assert not layer.bias.any()
    assert model.last_layer.bias is None
    weight_KP = model.last_layer.weight.detach()
    for k in range(40):
        for p in range(400):
            assert float(weight_KP[k, p]) == (1.0 if p // 10 == k else -0.5)
