"""Other patches of a class that could take a prototype's place, those first that set the class apart best."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.inference.latents import Latents, score_latents
from likethat.inference.source_image import cut_elsewhere
from likethat.models.protopnet import ProtoPNet
from likethat.training.project import off_object

ROUNDS = 15  # of k-means
NEAR, SPREAD = 16, 48  # patches looked at: those most like the old prototype, and some spread over the class


@dataclass(frozen=True)
class Patch:
    """A place in the latent map of a training image."""

    image: int
    row: int
    column: int


@dataclass(frozen=True)
class Candidate:
    patch: Patch
    similarity: float  # to the prototype it would replace
    own: float  # mean score in the other training images of the class
    other: float  # the largest mean score in the training images of another class
    other_label: int

    @property
    def lead(self) -> float:
        return self.own - self.other


@torch.no_grad()
def find_candidates(
    model: ProtoPNet, number: int, latents: Latents, taken: set[Patch], count: int, on_NHW: Tensor | None = None
) -> tuple[Candidate, ...]:
    """Find at most one patch of each image, and none that is in `taken`; fewer than `count` where the class has fewer.
    With `on_NHW`, patches are taken from these cells alone.

    Looked at are the patches nearest to prototype `number`, one an image, and patches spread over everything that the
    images of the class show, beginning with what is least like any prototype of the class.
    """
    layer = model.prototype_layer
    label, of_distance = int(layer.class_P[number]), layer.similarity.of_distance
    image_n = (latents.label_N == label).nonzero()[:, 0]
    z_nDHW = latents.of_images(image_n)
    patch_nSD = layer.patches(z_nDHW).flatten(2).transpose(1, 2)
    width = model.patch_grid[1]
    free_nS = torch.ones(patch_nSD.shape[:2], dtype=torch.bool, device=patch_nSD.device)
    if on_NHW is not None:
        free_nS &= ~off_object(on_NHW.to(free_nS.device)[image_n], layer.window)
    row_of = {image: n for n, image in enumerate(image_n.tolist())}
    for patch in taken:
        if patch.image in row_of:
            free_nS[row_of[patch.image], patch.row * width + patch.column] = False
    distance_nPS = layer(z_nDHW).distances().flatten(2)
    distance_nS = distance_nPS[:, number].masked_fill(~free_nS, float("inf"))
    order_n = distance_nS.amin(1).argsort(stable=True)[:NEAR]
    near_c = order_n * free_nS.shape[1] + distance_nS[order_n].argmin(1)
    free_f = free_nS.flatten().nonzero()[:, 0]
    if not len(free_f):
        return ()
    own_P = layer.class_P == label
    unlike_f = distance_nPS[:, own_P].amin(1).flatten()[free_f]
    spread_f = spread_choice(patch_nSD.flatten(0, 1)[free_f], unlike_f, min(SPREAD, len(free_f)))
    pick_c = torch.cat([near_c[free_nS.flatten()[near_c]], free_f[spread_f]]).unique()
    own_c, other_c, other_label_c = _tell_apart(model, patch_nSD.flatten(0, 1)[pick_c], pick_c, image_n, latents, label)
    similarity_c = of_distance(distance_nS.flatten()[pick_c])
    columns = (pick_c, similarity_c, own_c, other_c, other_label_c)
    candidates = []
    for pick, *figures in zip(*(column.tolist() for column in columns), strict=True):
        image, place = int(image_n[pick // free_nS.shape[1]]), pick % free_nS.shape[1]
        candidates.append(Candidate(Patch(image, place // width, place % width), *figures))
    best: dict[int, Candidate] = {}  # by image
    for candidate in sorted(candidates, key=lambda candidate: -candidate.lead):
        best.setdefault(candidate.patch.image, candidate)
    return tuple(best.values())[:count]


def _tell_apart(
    model: ProtoPNet, vector_cD: Tensor, pick_c: Tensor, image_n: Tensor, latents: Latents, label: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each candidate, its mean score in its class (its own image left out), the largest in another class,
    and which class that is."""
    class_c = torch.full_like(pick_c, label)
    score_Nc = score_latents(model.prototype_layer.with_prototypes(vector_cD, class_c), latents)
    source_c = image_n[pick_c // (model.patch_grid[0] * model.patch_grid[1])]
    member_NK = F.one_hot(latents.label_N, model.num_classes).to(score_Nc)
    image_N1 = torch.arange(len(score_Nc), device=score_Nc.device)[:, None]
    counted_Nc = cut_elsewhere(image_N1, source_c).to(score_Nc)
    mean_Kc = member_NK.T @ (score_Nc * counted_Nc) / (member_NK.T @ counted_Nc).clamp(min=1)
    own_c = mean_Kc[label].clone()
    mean_Kc[label] = -float("inf")
    other_c, other_label_c = mean_Kc.max(0)
    return own_c, other_c, other_label_c


def spread_choice(candidate_SD: Tensor, evidence_S: Tensor, count: int) -> Tensor:
    """Return `count` different candidates, one near each centre of a k-means that starts at the strongest evidence and
    then at whatever lies farthest from the centres so far."""
    start = [int(evidence_S.argmax())]
    distance_S = (candidate_SD - candidate_SD[start[0]]).square().sum(1)
    for _ in range(count - 1):
        start.append(int(distance_S.argmax()))
        distance_S = torch.minimum(distance_S, (candidate_SD - candidate_SD[start[-1]]).square().sum(1))
    centre_mD = candidate_SD[start]
    for _ in range(ROUNDS):
        nearest_Sm = F.one_hot(torch.cdist(candidate_SD, centre_mD).argmin(1), count).to(candidate_SD)
        centre_mD = (nearest_Sm.T @ candidate_SD) / nearest_Sm.sum(0).clamp(min=1)[:, None]
    distance_mS = torch.cdist(centre_mD, candidate_SD)
    taken: list[int] = []
    for number in range(count):
        taken.append(int(distance_mS[number].argmin()))
        distance_mS[:, taken[-1]] = float("inf")
    return torch.tensor(taken, device=candidate_SD.device)
