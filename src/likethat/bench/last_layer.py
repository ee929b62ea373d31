"""The convex last layer against the 20 passes of Adam that it replaces: over the same cached scores, and over the
network."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from likethat.bench.measure import BenchFigure, Goal, timed
from likethat.bench.setting import Setting
from likethat.models.protopnet import OTHER_WEIGHT, OWN_WEIGHT
from likethat.training.last_layer import objective, solve_last_layer

PASSES, BATCH, LEARNING_RATE, TOL = 20, 80, 1e-4, 1e-5
LAM, RIDGE = 1e-4, 1e-5  # lambda of the paper, and a tenth of the presets' ridge: harder to solve
SECONDS = {"cuda": Goal(2.0, unit=" s"), "cpu": Goal(60.0, unit=" s"), "mps": Goal(60.0, unit=" s")}
FASTER = Goal(50.0, at_least=True, unit=" times")  # than the passes of the network
PATCHES, LATENT = 6, 16  # of the made-up images


def last_layer_figures(backbone: str, setting: Setting, seconds_of_image: float) -> list[BenchFigure]:
    """Compare the solver with gradient steps; `seconds_of_image` is one forward pass of the bare network."""
    device = setting.device
    score_NP, label_N, class_P = (value.to(device) for value in synthetic_scores(setting))
    data = (score_NP, label_N, class_P)
    solve_last_layer(*data, setting.classes, lam=LAM, ridge=RIDGE, max_iterations=2)  # warms the libraries up
    seconds, solution = timed(lambda: solve_last_layer(*data, setting.classes, lam=LAM, ridge=RIDGE, tol=TOL), device)
    adam, adam_KP = timed(lambda: adam_passes(*data, setting.classes), device)
    network = PASSES * seconds_of_image * setting.scored
    best, adam_best = solution.objective, objective(adam_KP, *data, lam=LAM, ridge=RIDGE)
    size = f"{setting.scored} images, {setting.prototypes} prototypes"
    cached = f"{PASSES} Adam passes on cached scores"
    return [
        BenchFigure(backbone, f"last layer, {size}", "", seconds, None, "s", seconds, SECONDS[device.type]),
        BenchFigure(backbone, "its residual", "", solution.kkt_residual, None, "", solution.kkt_residual, Goal(TOL)),
        BenchFigure(backbone, "last layer", cached, seconds, adam, "s", seconds / adam),
        BenchFigure(backbone, "its objective", "theirs", best, adam_best, "", best / adam_best, Goal(1.0)),
        BenchFigure(
            backbone, "last layer", f"{PASSES} passes of the network", seconds, network, "s", network / seconds, FASTER
        ),
    ]


def synthetic_scores(setting: Setting, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, labels and prototype classes as a trained ProtoPNet gives them.

    A few latent patches an image, from classes that overlap in groups of ten (one genus, say); prototypes are patches
    of training images, as after projection; score = log((d + 1) / (d + 1e-4)) of the nearest patch.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    classes, images = setting.classes, setting.scored
    label_N = torch.arange(images) % classes
    class_P = torch.arange(classes).repeat_interleave(setting.per_class)
    genus_K = torch.arange(classes) // 10
    centre = 0.15 * normal(PATCHES, LATENT) + 0.175 * normal(int(genus_K[-1]) + 1, PATCHES, LATENT)[genus_K]
    centre = centre + 0.1 * normal(classes, PATCHES, LATENT)
    image = centre[label_N] + 0.15 * normal(images, PATCHES, LATENT) + 0.09 * normal(images, 1, LATENT)
    # Image i has class i mod K, so this picks a random image of each prototype's class.
    source_P = class_P + classes * torch.randint(images // classes, class_P.shape, generator=generator)
    prototype = image[source_P, torch.randint(PATCHES, class_P.shape, generator=generator)]
    distance_NP = torch.stack([torch.cdist(image[:, q], prototype).square() for q in range(PATCHES)]).amin(0)
    return torch.log((distance_NP + 1) / (distance_NP + 1e-4)), label_N, class_P


def adam_passes(score_NP: Tensor, label_N: Tensor, class_P: Tensor, classes: int) -> Tensor:
    """Return the weights of the paper's recipe on cached scores: start at +1 and -0.5, then 20 passes of Adam."""
    own_KP = class_P == torch.arange(classes, device=class_P.device)[:, None]
    weight_KP = torch.where(own_KP, OWN_WEIGHT, OTHER_WEIGHT).requires_grad_()
    optimizer = torch.optim.Adam([weight_KP], lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(PASSES):
        for index_B in torch.randperm(len(score_NP), generator=generator).to(score_NP.device).split(BATCH):
            loss = F.cross_entropy(score_NP[index_B] @ weight_KP.T, label_N[index_B])
            loss = loss + LAM * weight_KP.masked_fill(own_KP, 0).abs().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weight_KP.detach()
