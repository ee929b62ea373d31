"""Plan, augmentation and projection, each against a slow and obvious version."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.tiny import random_images, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from likethat.config.presets import resolve
from likethat.config.settings import AugmentConfig, TrainConfig
from likethat.data import loaders
from likethat.data.augment import draw_views, of_shown, show, shown_shares
from likethat.data.loaders import training_batches, views_of
from likethat.errors import UserError
from likethat.inference import passes
from likethat.models.backbone import configured_backbone
from likethat.models.baseline import BaselineClassifier
from likethat.training import project as project_module
from likethat.training.loop import batch_costs
from likethat.training.losses import shared_entropy
from likethat.training.plan import make_plan, relative_size, start_stage
from likethat.training.project import project
from likethat.training.state import RunState

RESNET34 = Path(__file__).resolve().parents[3] / "shared" / "weights" / "resnet34.safetensors"


def test_paper_plan() -> None:
    """5 warm epochs; projections after the authors' epochs 10, 20 and 30, each followed by the last layer."""
    plan = make_plan(resolve("paper").train)
    epochs = [step for step in plan if step.is_epoch]
    assert [step.stage for step in epochs[:6]] == ["warm"] * 5 + ["joint"]
    done, projected_after = -1, []
    for step, following in zip(plan, [*plan[1:], None], strict=True):
        done += step.is_epoch
        if step.stage == "project":
            projected_after.append(done)
            assert following is not None
            assert following.stage == "last_layer"
    assert projected_after == [10, 20, 30]
    assert plan[-1].stage == "last_layer"


def test_paper_decays_everything_but_prototypes_and_ours_spares_vectors() -> None:
    model = tiny_model([2, 2])
    for preset, spared in (("paper", 0), ("default", 1)):
        optimizer = start_stage(model, None, "joint", resolve(preset).train)
        free = [
            parameter for group in optimizer.param_groups if not group["weight_decay"] for parameter in group["params"]
        ]
        vectors = [parameter for parameter in free if parameter is not model.prototype_layer.prototype_PDhw]
        assert bool(vectors) == bool(spared)
        assert all(parameter.ndim <= 1 for parameter in vectors)
        assert not model.last_layer.weight.requires_grad


def median_size(backbone: torch.nn.Module) -> float:
    """Of the layers' root mean squares, one by one; the lower one of two in the middle."""
    layers = [weight.detach().flatten().tolist() for weight in backbone.parameters() if weight.ndim > 1]
    sizes = sorted(math.sqrt(sum(value**2 for value in values) / len(values)) for values in layers)
    return sizes[(len(sizes) - 1) // 2]


def rates(state: RunState, stage: str, config: TrainConfig) -> tuple[set[float], set[float]]:
    """The learning rates of the backbone, and those of what follows it."""
    own = {id(weight) for weight in state.backbone.parameters()}
    groups = state.optimizer_for(stage, config).param_groups
    backbone = {group["full_lr"] for group in groups if id(group["params"][0]) in own}
    return backbone, {group["full_lr"] for group in groups} - backbone


@pytest.mark.parametrize("factor", [0.5, 1.7])
def test_larger_weights_take_larger_steps_in_joint_training(factor: float) -> None:
    model, config = tiny_model([2, 2]), resolve("default").train
    state = RunState(model, BaselineClassifier(model.backbone, 2))
    assert rates(state, "baseline", config) == ({config.baseline_lr}, {config.head_lr})
    with torch.no_grad():
        for weight in model.backbone.parameters():
            weight.mul_(factor)
    expected = config.backbone_lr * median_size(model.backbone) / 0.0214
    (rate,), others = rates(state, "joint", config)
    assert rate == pytest.approx(expected, rel=1e-5)
    assert others == {config.add_on_lr}
    with torch.no_grad():
        for weight in model.backbone.parameters():
            weight.mul_(9)
    state.forget_optimizer()
    assert rates(state, "joint", config)[0] == {rate}, "what training makes of the weights changes no rate"


def test_rates_are_as_written_where_they_are_not_relative() -> None:
    model, config = tiny_model([2, 2]), replace(resolve("default").train, relative_lr=False)
    assert rates(RunState(model), "joint", config) == ({config.backbone_lr}, {config.add_on_lr})
    assert not resolve("paper").train.relative_lr


def test_weights_of_lite0_are_larger_than_those_of_resnet34() -> None:
    backbone = configured_backbone(resolve("default").model, "pretrained")
    assert relative_size(backbone) == pytest.approx(0.0978559 / 0.0214, rel=1e-3)


def test_the_preset_s_rate_is_that_of_resnet34() -> None:
    if not RESNET34.is_file():
        pytest.skip("resnet34.safetensors is not at ../shared/weights")
    backbone = configured_backbone(resolve(backbone="resnet34").model, str(RESNET34))
    assert relative_size(backbone) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("flip", [0.5, 0.0])
def test_the_baseline_teaches_what_it_thinks_of_a_view_and_of_its_mirror_image(flip: float) -> None:
    config = resolve("default", tie=False, flip=flip)
    model = tiny_model([2, 2, 2], add_on="linear", similarity="cosine").eval()
    baseline = BaselineClassifier(model.backbone, 3)
    torch.nn.init.normal_(baseline.head.weight)  # or it would be of one mind about all pictures
    x_B3HW, label_B = random_images(4, 3).batch(torch.arange(4))
    known = label_B[:, None], torch.ones(4, 1), torch.arange(4)[:, None], torch.arange(4)
    cells = torch.zeros(4, 3, 3, dtype=torch.bool), torch.zeros(4, 1, 2, 3, 3, dtype=torch.bool)
    costs = batch_costs(RunState(model, baseline), "joint", config, x_B3HW, *known, *cells)
    with torch.no_grad():
        seen_BK, mirrored_BK = baseline(x_B3HW).softmax(1), baseline(x_B3HW.flip(3)).softmax(1)
        said_BK = model(x_B3HW).logits_BK.log_softmax(1)
    assert not torch.allclose(seen_BK, mirrored_BK, rtol=0.01)
    target_BK = (seen_BK + mirrored_BK) / 2 if flip else seen_BK
    expected = (target_BK * (target_BK.log() - said_BK)).sum(1).mean()
    assert float(costs["distillation"].detach()) == pytest.approx(float(expected), rel=1e-4)


def augment(x: torch.Tensor, config: AugmentConfig, generator: torch.Generator) -> torch.Tensor:
    return show(x, draw_views(len(x), x.shape[2] / x.shape[3], config, generator))


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 300), st.integers(2, 90), st.integers(1, 3))
def test_batches_hold_every_image_once_a_view(count: int, batch_size: int, views: int) -> None:
    batches = training_batches(count, batch_size, views, seed=1)
    assert batches.shape[1] <= batch_size
    filled_up = batches.numel() - count * views
    assert 0 <= filled_up < len(batches), "as few as equal sizes allow"
    seen = batches.flatten()[: count * views].view(views, count).sort(1).values
    assert torch.equal(seen, torch.arange(count).expand(views, count))


@pytest.mark.parametrize("preset", ["default", "paper"])
def test_augmentation_is_fresh_reproducible_and_leaves_no_black_corner(preset: str) -> None:
    white = torch.ones(64, 3, 40, 56)
    same = torch.rand(1, 3, 40, 56).expand(64, 3, 40, 56)
    config = resolve(preset).augment
    warps_only = replace(config, jitter=0.0, erase=0.0)
    assert augment(white, warps_only, torch.Generator().manual_seed(3)).min() > 0.999
    first = augment(same, config, torch.Generator().manual_seed(3))
    assert torch.equal(first, augment(same, config, torch.Generator().manual_seed(3)))
    different = len({picture.numpy().tobytes() for picture in first})  # the paper's are by whole degrees
    assert different >= (64 if preset == "default" else 40), "each picture gets its own draw"
    assert first.min() >= 0
    assert first.max() <= 1


STILL = AugmentConfig(rotation=0, skew=0, shear=0, distortion=0, flip=0, zoom=1, jitter=0, erase=0, cutmix=0)


def test_flip_mirrors_the_picture_exactly() -> None:
    x = torch.rand(3, 3, 20, 30)
    flipped = augment(x, replace(STILL, flip=1.0), torch.Generator().manual_seed(0))
    assert torch.allclose(flipped, x.flip(3), atol=1e-5)
    assert torch.allclose(augment(x, STILL, torch.Generator().manual_seed(0)), x, atol=1e-5)


def test_a_zoomed_view_is_a_part_of_the_picture() -> None:
    """A ramp along x stays a ramp, over a shorter range that lies inside the old one."""
    ramp = torch.linspace(0, 1, 60).expand(20, 3, 40, 60)
    views = augment(ramp, replace(STILL, zoom=0.5), torch.Generator().manual_seed(0))
    spans = views[:, 0, 20, -1] - views[:, 0, 20, 0]
    assert (spans > 0.49 * 59 / 60).all()
    assert (spans < 1).all()
    assert spans.max() - spans.min() > 0.2


def test_an_erased_view_has_one_gray_hole_of_the_stated_size() -> None:
    white = torch.ones(50, 3, 50, 50)
    views = augment(white, replace(STILL, erase=1.0), torch.Generator().manual_seed(0))
    share = (views[:, 0] < 0.9).float().mean((1, 2))
    assert (views[views < 0.9] == 0.5).all()
    assert (share > 0).all()
    assert float(share.max()) < 0.22


def test_a_view_of_an_image_is_the_same_in_any_batch_and_no_two_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    images = random_images(12, 3)
    views = views_of(images, resolve("default").augment, seed=5, count=2)
    together, labels = views.batch(torch.arange(24))
    with monkeypatch.context() as patched:  # as large pictures are gone through, five at a time
        patched.setattr(loaders, "VIEW_PIXELS", 5 * together[0, 0].numel())
        in_parts, labels_in_parts = views.batch(torch.arange(24))
    assert torch.allclose(in_parts, together, atol=1e-3)
    assert torch.equal(labels_in_parts, labels)
    alone = torch.cat([views.batch(torch.tensor([number]))[0] for number in range(24)])
    assert torch.allclose(together, alone, atol=1e-3)
    assert torch.equal(labels, images.label_N.repeat(2))
    pictures = images.batch(torch.arange(12))[0]
    for one, other in ((together[:12], pictures), (together[12:], pictures), (together[:12], together[12:])):
        assert ((one - other).abs().mean((1, 2, 3)) > 0.01).all()
    still = views_of(images, STILL, seed=5, count=2)
    assert torch.allclose(still.batch(torch.arange(24))[0], pictures.repeat(2, 1, 1, 1), atol=1e-3)


def test_a_piece_comes_from_the_picture_before_and_is_told() -> None:
    """Each picture is of one brightness, so a view tells by its pixels which images it shows."""
    x = (torch.arange(40) / 40)[:, None, None, None].expand(40, 3, 64, 64)
    views = draw_views(40, 1.0, replace(STILL, cutmix=0.5), torch.Generator().manual_seed(0))
    shown = [{round(40 * float(value)) for value in view.unique()} for view in show(x, views)]
    told = of_shown(torch.arange(40), views)
    assert [set(images) for images in told.tolist()] == shown
    assert 10 < sum(len(images) == 2 for images in shown) < 30
    covered = (show(x, views)[:, 0] != x[:, 0]).float().mean((1, 2))
    assert float(covered.max()) < 0.55
    assert float(covered.max()) > 0.3
    torch.testing.assert_close(shown_shares(views)[:, 1], covered, rtol=0, atol=2 / 64)  # whole pixels are covered
    assert torch.equal(shown_shares(views).sum(1), torch.ones(40))


def test_a_pieced_picture_is_of_each_class_as_much_as_it_shows_of_it() -> None:
    logits_BK = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    label_BV, share_BV = torch.tensor([[0, 3], [2, 2]]), torch.tensor([[0.7, 0.3], [1.0, 0.0]])
    wanted_BK = torch.tensor([[0.7, 0.0, 0.0, 0.3], [0.0, 0.0, 1.0, 0.0]])
    smoothed_BK = 0.9 * wanted_BK + 0.1 / 4
    expected = -(smoothed_BK * logits_BK.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(shared_entropy(logits_BK, label_BV, share_BV, 0.1), expected)


def test_rotation_keeps_shapes_in_pictures_that_are_not_square() -> None:
    """A disc stays a disc: its extent along x and y is the same number of pixels after a rotation."""
    y, x = torch.meshgrid(torch.arange(100.0), torch.arange(160.0), indexing="ij")
    disc = (((x - 79.5) ** 2 + (y - 49.5) ** 2) < 15**2).float().expand(1, 3, 100, 160)
    config = replace(STILL, rotation=25)
    for seed in range(8):
        turned = augment(disc, config, torch.Generator().manual_seed(seed))[0, 0] > 0.5
        assert abs(int(turned.any(0).sum()) - 30) <= 2
        assert abs(int(turned.any(1).sum()) - 30) <= 2


@pytest.mark.parametrize(
    ("counts", "window", "similarity", "most"),
    [
        ([3, 3, 3], (1, 1), "log", 2**28),
        ([1, 5, 2], (2, 1), "log", 2**28),
        ([4, 1, 1], (1, 1), "cosine", 2**28),
        ([3, 1, 2], (1, 1), "log", 1),  # memory for the candidates of one class at a time
        ([2, 3, 1], (1, 1), "cosine", 2 * 3 * 3 * 16 * 4),  # of two
        ([0, 3, 2], (1, 1), "log", 1),  # a class without prototypes, by itself
    ],
)
@pytest.mark.parametrize("batch", [4, 64])  # classes in several batches; all images in one
def test_projection_is_the_nearest_free_patch(
    counts: list[int], window: tuple[int, int], similarity: str, most: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the definition spelled out: all pairs sorted by distance, settled one after the other."""
    monkeypatch.setattr(project_module, "MOST_BYTES", most)
    monkeypatch.setattr(passes, "EVAL_BATCH", batch)
    model = tiny_model(counts, prototype_shape=window, similarity=similarity)
    images = random_images(31, 3)  # 31: classes of uneven size, mixed order
    before = model.prototype_layer.vectors().detach().clone()
    raw_PDhw = model.prototype_layer.prototype_PDhw.detach().clone()
    projection = project(model, images, ("a", "b", "c"))
    with torch.no_grad():
        patch = model.prototype_layer.patches(model.eval().latent(images.batch(torch.arange(31))[0]))
    pairs = []
    for j, k in enumerate(model.prototype_layer.class_P.tolist()):
        for n in range(31):
            for row in range(patch.shape[2]):
                for column in range(patch.shape[3]):
                    if int(images.label_N[n]) == k:
                        distance = float((patch[n, :, row, column] - before[j]).square().sum())
                        pairs.append((distance, j, n, row, column))
    wanted: dict[int, tuple[int, int, int]] = {}
    for _, j, *place in sorted(pairs):
        if j not in wanted and tuple(place) not in wanted.values():
            wanted[j] = (place[0], place[1], place[2])
    got = list(zip(projection.image_P.tolist(), projection.row_P.tolist(), projection.column_P.tolist(), strict=True))
    assert got == [wanted[j] for j in range(sum(counts))]
    after = model.prototype_layer.vectors().detach()
    for j, (n, row, column) in enumerate(got):
        assert torch.allclose(after[j], patch[n, :, row, column], atol=1e-6)
        assert float(projection.moved_P[j]) == pytest.approx(float((after[j] - before[j]).norm()), abs=1e-5)
    assert torch.equal(model.prototype_layer.unprojected_PDhw, raw_PDhw)


def test_identical_prototypes_take_different_patches() -> None:
    model = tiny_model([6, 2])
    with torch.no_grad():
        model.prototype_layer.prototype_PDhw[:] = 0.5
    projection = project(model, random_images(4, 2), ("a", "b"))
    places = set(zip(projection.image_P.tolist(), projection.row_P.tolist(), projection.column_P.tolist(), strict=True))
    assert len(places) == 8


def test_identical_images_leave_the_earlier_one_the_source() -> None:
    model = tiny_model([1, 1])
    images = random_images(6, 2)
    images.pixel_NHW3[:] = images.pixel_NHW3[0].clone()
    projection = project(model, images, ("a", "b"))
    assert projection.image_P.tolist() == [0, 1]


def test_too_many_prototypes_for_the_patches_are_refused() -> None:
    with pytest.raises(UserError, match="Class 'b' has 9 training patches for 10 prototypes"):
        project(tiny_model([2, 10]), random_images(2, 2), ("a", "b"))
