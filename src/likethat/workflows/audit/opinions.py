"""What pictures are likely to be, judged without their own labels: each opinion is a table of log probabilities.

A network that was trained has memorised its training pictures, wrong labels included, so it cannot be asked about
them. What a backbone saw in them before it was trained depends on no label. A linear layer on that is fitted without
the picture it judges, and without the others of its group, which are likely to have the same wrong label. Both steps
are exact, so nothing here is random.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.config.settings import TrainConfig
from likethat.data.loaders import Images
from likethat.inference.passes import batches_of
from likethat.models.backbone import Backbone
from likethat.models.protopnet import logits_of_scores
from likethat.progress import Advance
from likethat.runtime import seed_for
from likethat.training.last_layer import solve_last_layer, terms_of

# Ridges of the linear layer, on features of length 1, and factors of its answers before they become probabilities.
RIDGES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
FACTORS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 8.0, 12.0, 18.0, 25.0, 35.0, 50.0, 70.0, 100.0)
TOLERATED = 1.03  # times the least cross entropy: within that the largest ridge is taken, which believes labels least
FOLDS = 5


@torch.no_grad()
def pooled_features(backbone: Backbone, images: Images, advance: Advance | None = None) -> Tensor:
    """Return the mean and the largest value of every channel of the backbone's maps: N x 2C."""
    backbone.eval()
    feature_NC = torch.zeros(len(images), 2 * backbone.channels)
    for index_B, x_B3HW, _ in batches_of(images, advance):
        map_BCHW = backbone(x_B3HW)
        feature_NC[index_B] = torch.cat([map_BCHW.mean((2, 3)), map_BCHW.amax((2, 3))], 1).cpu()
    return feature_NC


def opinion_of_features(feature_NC: Tensor, label_N: Tensor, group_N: Tensor, classes: int) -> Tensor:
    """Return log probabilities, N x K, by a ridge regression of the labels on the features. Each row is what it says
    when that picture's group is left out, which follows from the one fit to all of them."""
    x_NC = feature_NC.double()
    x_NC = F.normalize(x_NC - x_NC.mean(0), dim=1)
    x_NC = torch.cat([x_NC, torch.ones_like(x_NC[:, :1])], 1)
    target_NK = F.one_hot(label_N.cpu(), classes).double()
    value_C, vector_CC = torch.linalg.eigh(x_NC.T @ x_NC / len(x_NC))
    along_NC = x_NC @ vector_CC
    product_CK = along_NC.T @ target_NK / len(x_NC)
    found = []
    for ridge in RIDGES:
        inverse_C = 1 / (value_C.clamp(min=0) + ridge)
        missed_NK = target_NK - along_NC @ (inverse_C[:, None] * product_CK)
        weighed_NC = along_NC * (inverse_C / len(x_NC)).sqrt()
        found.append(scaled(target_NK - missed_without(missed_NK, weighed_NC, group_N.cpu()), label_N))
    least = min(entropy for entropy, _ in found)
    return [log_NK for entropy, log_NK in found if entropy <= TOLERATED * least][-1]


def missed_without(missed_NK: Tensor, weighed_NC: Tensor, group_N: Tensor) -> Tensor:
    """Return what a linear fit would miss in each row, had it not seen the rows of its group: (1 - H)^-1 of what it
    misses, with the group's block of the projection H. `weighed_NC` are rows of which H is the product."""
    leverage_N = weighed_NC.square().sum(1)
    without_NK = missed_NK / (1 - leverage_N)[:, None].clamp(min=1e-6)
    order_N = group_N.argsort(stable=True)
    for rows_n in order_N.split(group_N[order_N].unique_consecutive(return_counts=True)[1].tolist()):
        if len(rows_n) > 1:
            kept_nn = torch.eye(len(rows_n), dtype=weighed_NC.dtype) - weighed_NC[rows_n] @ weighed_NC[rows_n].T
            without_NK[rows_n] = torch.linalg.solve(kept_nn, missed_NK[rows_n])
    return without_NK


def scaled(logits_NK: Tensor, label_N: Tensor) -> tuple[float, Tensor]:
    """Return the least mean cross entropy that a factor of the logits gives, and the log probabilities it gives."""
    tried = []
    for factor in FACTORS:
        log_NK = (factor * logits_NK.cpu().double()).log_softmax(1)
        tried.append((float(-own_values(log_NK, label_N).mean()), log_NK))
    return min(tried, key=lambda entry: entry[0])


def own_values(value_NK: Tensor, label_N: Tensor) -> Tensor:
    return value_NK.gather(1, label_N.to(value_NK.device)[:, None])[:, 0]


def refitted_logits(
    score_NP: Tensor, label_N: Tensor, group_N: Tensor, class_P: Tensor, classes: int, settings: TrainConfig
) -> Tensor:
    """Return logits, N x K, by last layers that were each solved without the groups of pictures that they judge.

    Groups have numbers from 0 on.
    """
    generator, groups = torch.Generator().manual_seed(seed_for(settings.seed, "audit")), int(group_N.max()) + 1
    fold_N = (torch.randperm(groups, generator=generator)[group_N.cpu()] % FOLDS).to(label_N.device)
    logits_NK = score_NP.new_zeros(len(label_N), classes)
    for fold in range(min(FOLDS, groups)):
        learned_N = fold_N != fold
        solution = solve_last_layer(
            score_NP[learned_N],
            label_N[learned_N],
            class_P,
            classes,
            lam=settings.l1,
            **terms_of(settings),
        )
        logits_NK[~learned_N] = logits_of_scores(score_NP[~learned_N], solution.weight_KP)
    return logits_NK
