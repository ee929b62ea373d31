"""The costs that gradient descent minimises, and the probabilities that one of them is taken against."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from likethat.config.settings import TrainConfig
from likethat.data.cells import tiles
from likethat.inference.attack import lower_similarity
from likethat.inference.moments import at_places
from likethat.models.baseline import BaselineClassifier
from likethat.models.protopnet import Output, ProtoPNet
from likethat.models.prototypes import products
from likethat.training.batches import Shown

TEMPERATURE = 0.1  # of similarities, where places are compared
EVERY = 4  # pictures, of which one is attacked by the context cost
BOUND = 0.0225  # of its change, of pixels from 0 to 1: nobody sees it
UNCHANGED = 36 / 112  # half the side of what stays as it is around a patch, where a picture goes from -1 to 1
LEAST = 0.1  # similarity that a share is taken of

Costs = dict[str, Tensor]
CostsOf = Callable[..., Costs]  # of what is shown: pictures, and what is known of them


def cluster_cost(min_distance_BP: Tensor, own_BP: Tensor) -> Tensor:
    """Return the paper's Clst: the mean distance of an image to the nearest prototype of its own class."""
    return min_distance_BP.masked_fill(~own_BP, float("inf")).amin(1).mean()


def separation_cost(min_distance_BP: Tensor, own_BP: Tensor) -> Tensor:
    """Return the paper's Sep: minus the mean distance of an image to the nearest prototype of another class."""
    return -min_distance_BP.masked_fill(own_BP, float("inf")).amin(1).mean()


def distillation_cost(logits_BK: Tensor, teacher_logits_BK: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence from the baseline's probabilities."""
    return F.kl_div(logits_BK.log_softmax(1), teacher_logits_BK.log_softmax(1), reduction="batchmean", log_target=True)


@torch.no_grad()
def target_logits(teacher: BaselineClassifier, x_B3HW: Tensor, *, mirrors: bool) -> Tensor:
    """Return the logarithm, up to a constant, of the probabilities to match: the teacher's for a view.

    With `mirrors`, its mean for the view and its mirror image, which is right more often than for one of them.
    """
    if not mirrors:
        return teacher(x_B3HW).float()
    both_2BK = teacher(torch.cat([x_B3HW, x_B3HW.flip(-1)])).float().log_softmax(1).unflatten(0, (2, -1))
    return both_2BK.logsumexp(0)


def locality_cost(z_BDHW: Tensor, same_BHW: Tensor) -> Tensor:
    """Return one less the mean cosine of patches that show the same pixels in a picture and in the one before it.

    What a patch is like should not depend on what lies around it. A picture without such patches costs nothing. Before
    a part of a batch there may be one more map, of the picture before it.
    """
    direction_BDHW = F.normalize(z_BDHW.float(), dim=1)
    before_BDHW = direction_BDHW.roll(1, 0)
    if len(direction_BDHW) > len(same_BHW):
        direction_BDHW, before_BDHW = direction_BDHW[1:], before_BDHW[1:]
    away_BHW = 1 - (direction_BDHW * before_BDHW).sum(1)
    return ((away_BHW * same_BHW).sum((1, 2)) / same_BHW.sum((1, 2)).clamp(min=1)).mean()


def place_cost(similarity_BVmHW: Tensor, part_BVmHW: Tensor) -> Tensor:
    """Return the cross entropy of where prototypes are found: minus the logarithm of the share of a map, as a softmax,
    that lies on the prototype's part. A part that a picture does not show costs nothing."""
    chance_BVmS = (similarity_BVmHW.float() / TEMPERATURE).flatten(3).log_softmax(3)
    part_BVmS = part_BVmHW.flatten(3)
    on_part_BVm = chance_BVmS.masked_fill(~part_BVmS, torch.finfo(torch.float32).min).logsumexp(3)
    return -torch.where(part_BVmS.any(3), on_part_BVm, 0.0).sum(1).mean()


def context_cost(model: ProtoPNet, z_BDHW: Tensor, batch: Shown) -> Tensor:
    """Return the share of a similarity that an invisible change around the patch takes: the mean of every fourth
    picture, of one prototype of its class. In every other one of them that is the most similar, else each in turn.

    The change is one step along the sign of the gradient. Where there is no similarity, nothing can be taken. What is
    left is to grow, and not what there was to shrink: the similarity before is a number here, without a gradient.
    """
    turn_B = batch.turn_B
    attacked_b = (turn_B % EVERY).argsort(stable=True)[: -(-len(turn_B) // EVERY)]  # a number that is known beforehand
    round_b, is_due_b = turn_B[attacked_b] // EVERY, turn_B[attacked_b] % EVERY == 0
    x_b3HW, label_b = batch.own(batch.x_B3HW)[attacked_b], batch.label_BV[attacked_b, 0]
    with torch.no_grad():
        similarity_bmHW = own_similarities(model, batch.own(z_BDHW)[attacked_b], label_b[:, None])[:, 0]
        similarity_bmS = similarity_bmHW.flatten(2)
        best_bm = similarity_bmS.amax(2)
        which_b = torch.where(round_b % 2 == 0, best_bm.argmax(1), round_b // 2 % best_bm.shape[1])
        similarity_bS = similarity_bmS.gather(1, which_b[:, None, None].expand(-1, 1, similarity_bmS.shape[2]))[:, 0]
        before_b1, place_b1 = similarity_bS.max(1, keepdim=True)
        before_b = before_b1[:, 0]
        vector_bD = by_class(model.prototype_layer.vectors(), model.prototypes_of_class)[label_b, which_b]

    def similarity_there(changed_b3HW: Tensor) -> Tensor:
        patch_bD = at_places(model.prototype_layer.patches(model.latent(changed_b3HW)), place_b1)[:, 0]
        return (patch_bD * vector_bD).sum(1)

    y_HW, x_HW = tiles((x_b3HW.shape[2], x_b3HW.shape[3])).coordinates(x_b3HW.device)
    middle_x_b11, middle_y_b11 = model.backbone.cells.places(place_b1[:, :, None]).unbind(-1)
    free_bHW = ((y_HW - middle_y_b11).abs() > UNCHANGED) | ((x_HW - middle_x_b11).abs() > UNCHANGED)
    where, bound = (x_b3HW, torch.zeros_like(x_b3HW), free_bHW[:, None]), x_b3HW.new_full((), BOUND)
    change_b3HW = lower_similarity(similarity_there, *where, bound=bound, step=bound, steps=1)
    lost_b = F.relu(1 - similarity_there(x_b3HW + change_b3HW) / before_b.clamp(min=LEAST))
    return (lost_b * (is_due_b & (before_b > 0))).sum() * EVERY / len(turn_B)


def own_similarities(model: ProtoPNet, z_BDHW: Tensor, label_BV: Tensor) -> Tensor:
    """Return the activation maps of the prototypes of some classes of each picture: B, V, m, H, W. Where a class has
    fewer than others, those that it lacks are alike everywhere."""
    layer = model.prototype_layer
    patch_BDHW, vector_KmD = layer.patches(z_BDHW), by_class(layer.vectors(), model.prototypes_of_class)
    vector_BPD = vector_KmD[label_BV].flatten(1, 2)
    with torch.autocast(z_BDHW.device.type, enabled=False):
        product_BPHW = products(patch_BDHW, vector_BPD)
    return product_BPHW.unflatten(1, (label_BV.shape[1], -1))


def by_class(vector_PD: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the vectors of every class, K, m, D, filled up with zeros; they lie class by class."""
    if len(set(counts)) == 1:
        return vector_PD.unflatten(0, (len(counts), -1))
    most = max(counts)
    return torch.stack([F.pad(own_mD, (0, 0, 0, most - len(own_mD))) for own_mD in vector_PD.split(list(counts))])


def map_costs(model: ProtoPNet, z_BDHW: Tensor, batch: Shown, config: TrainConfig) -> Costs:
    """Return the costs that have a weight and are about what patches are like and where prototypes are found."""
    costs = {}
    if config.locality:
        costs["locality"] = locality_cost(z_BDHW, batch.same_BHW)
    if config.context and model.prototype_layer.similarity.angular and model.backbone.windows is None:
        costs["context"] = context_cost(model, z_BDHW, batch)
    if config.place or config.on_mask:
        similarity_BVmHW = own_similarities(model, batch.own(z_BDHW), batch.label_BV)
    if config.place:
        costs["place"] = place_cost(similarity_BVmHW, batch.part_BVmHW)
    if config.on_mask:
        costs["on_mask"] = place_cost(similarity_BVmHW, batch.on_BVHW[:, :, None].expand_as(similarity_BVmHW))
    return costs


def shared_entropy(logits_BK: Tensor, label_BV: Tensor, share_BV: Tensor, smoothing: float) -> Tensor:
    """Return the cross entropy with the labels of the V images that each picture shows, by the shares it shows."""
    logits_BKV = logits_BK[:, :, None].expand(-1, -1, label_BV.shape[1])
    entropy_BV = F.cross_entropy(logits_BKV, label_BV, reduction="none", label_smoothing=smoothing)
    return (share_BV * entropy_BV).sum(1).mean()


def baseline_costs(logits_BK: Tensor, label_B: Tensor, config: TrainConfig) -> Costs:
    loss = F.cross_entropy(logits_BK, label_B, label_smoothing=config.label_smoothing)
    return {"cross_entropy": loss, "loss": loss}


def answer_costs(
    logits_BK: Tensor, label_BV: Tensor, share_BV: Tensor, config: TrainConfig, teacher_logits_BK: Tensor | None
) -> Costs:
    """Return the costs that are about the answers of a network, with or without prototypes."""
    costs = {"cross_entropy": shared_entropy(logits_BK, label_BV, share_BV, config.label_smoothing)}
    loss = costs["cross_entropy"]
    if teacher_logits_BK is not None:
        costs["distillation"] = distillation_cost(logits_BK, teacher_logits_BK)
        loss = (1 - config.distillation) * loss + config.distillation * costs["distillation"]
    return {**costs, "loss": loss}


def protopnet_costs(
    output: Output,
    label_BV: Tensor,
    share_BV: Tensor,
    own_KP: Tensor,
    config: TrainConfig,
    teacher_logits_BK: Tensor | None = None,
    others: Costs | None = None,
) -> Costs:
    """Return every cost by name; 'loss' is their weighted sum. Clusters form around the first image of a picture.

    The weight of each of the `others` is the option of its name.
    """
    own_BP = own_KP[label_BV[:, 0]]
    costs = answer_costs(output.logits_BK, label_BV, share_BV, config, teacher_logits_BK)
    entropy = costs.pop("loss")
    costs["cluster"] = cluster_cost(output.min_distance_BP, own_BP)
    costs["separation"] = separation_cost(output.min_distance_BP, own_BP)
    costs["loss"] = entropy + config.cluster * costs["cluster"] + config.separation * costs["separation"]
    for name, cost in (others or {}).items():
        costs["loss"] = costs["loss"] + getattr(config, name) * cost
    return {**costs, **(others or {})}
