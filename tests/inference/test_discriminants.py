"""Discriminants of patches against a textbook's linear discriminant analysis, class by class and part by part."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.tiny import random_images, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import eigh

from likethat.inference import passes
from likethat.inference.discriminants import REST, ROUNDING, SHRINKAGE, Scatter, discriminants, part_scatter
from likethat.inference.feature_maps import FeatureMaps, keep_feature_maps
from likethat.models.backbone import create_backbone

BACKBONE = create_backbone("test_resnet", "none", (32, 32)).eval()
CHANNELS, CPU = BACKBONE.channels, torch.device("cpu")


def slow_scatter(maps: FeatureMaps, place_Nm: torch.Tensor, shown_Nm: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Return mean, covariance within, and covariance between, from lists of patches."""
    patches: dict[tuple[int, int], list[np.ndarray]] = {}
    for n, map_CHW in enumerate(maps.map_NCHW.numpy().astype(float)):
        for m, place in enumerate(place_Nm[n].tolist()):
            if shown_Nm[n, m]:
                patches.setdefault((int(maps.label_N[n]), m), []).append(map_CHW.reshape(CHANNELS, -1)[:, place])
    everything = [patch for found in patches.values() for patch in found]
    within, between = np.zeros((CHANNELS, CHANNELS)), np.zeros((CHANNELS, CHANNELS))
    mean = np.mean(everything, axis=0)
    for found in patches.values():
        own = np.mean(found, axis=0)
        between += len(found) * np.outer(own - mean, own - mean)
        within += sum(np.outer(patch - own, patch - own) for patch in found)
    return mean, within / len(everything), between / len(everything)


def some_maps(seed: int, images: int, classes: int, parts: int) -> tuple[FeatureMaps, torch.Tensor, torch.Tensor]:
    """Return 2x3 maps that differ from class to class, places in them, and which of these show a part."""
    generator = torch.Generator().manual_seed(seed)
    label_N = torch.randint(classes, (images,), generator=generator)
    map_NCHW = torch.randn(images, CHANNELS, 2, 3, generator=generator) + label_N[:, None, None, None].sin()
    map_NCHW[:, ::3] *= 5
    shown_Nm = torch.rand(images, parts, generator=generator) < 0.7
    shown_Nm[0, 0] = True
    return FeatureMaps(map_NCHW, label_N, CPU), torch.randint(6, (images, parts), generator=generator), shown_Nm


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 70), st.integers(1, 5), st.integers(1, 4))
def test_scatter_is_that_of_the_patches_that_show_their_part(seed: int, images: int, classes: int, parts: int) -> None:
    data = some_maps(seed, images, classes, parts)
    found = part_scatter(BACKBONE, *data)
    for value, expected in zip(vars(found).values(), slow_scatter(*data), strict=True):
        np.testing.assert_allclose(value.numpy(), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 70), st.integers(2, 5), st.integers(1, 4), st.integers(1, 20))
def test_directions_are_the_textbooks(seed: int, images: int, classes: int, parts: int, width: int) -> None:
    """Up to their signs."""
    scatter = part_scatter(BACKBONE, *some_maps(seed, images, classes, parts))
    within, between = scatter.within_CC.numpy(), scatter.between_CC.numpy()
    least = ROUNDING * float(scatter.mean_C.square().mean() + between.diagonal().mean())
    ridge = SHRINKAGE * max(float((within + 1e-6 * between).diagonal().mean()), least)
    value, vector = eigh(between + REST * within, within + ridge * np.eye(CHANNELS))
    weight_DC, bias_D = discriminants(scatter, width)
    np.testing.assert_allclose(bias_D, -weight_DC @ scatter.mean_C)
    if value[-width] - value[-width - 1] > 1e-4 * value[-1]:  # else it is chance which of two directions is the last
        gram = (vector[:, -width:] * value[-width:] / (value[-width:] + 1)) @ vector[:, -width:].T
        np.testing.assert_allclose(weight_DC.T @ weight_DC, gram, rtol=1e-6, atol=1e-9 * np.abs(gram).max())


@pytest.mark.parametrize("shown", [False, True])
def test_there_are_directions_however_little_is_shown(*, shown: bool) -> None:
    """No part, and one picture of each of two classes, whose patches vary in nothing but their class."""
    maps, place_Nm, shown_Nm = some_maps(0, 2, 2, 3)
    scatter = part_scatter(
        BACKBONE, FeatureMaps(maps.map_NCHW, torch.arange(2), CPU), place_Nm, torch.full_like(shown_Nm, shown)
    )
    weight_DC, bias_D = discriminants(scatter, CHANNELS)
    assert weight_DC.isfinite().all()
    assert bias_D.isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 1e4])
def test_features_that_are_all_the_same_have_directions_too(size: float) -> None:
    maps, place_Nm, shown_Nm = some_maps(0, 9, 2, 3)
    same = FeatureMaps(torch.full_like(maps.map_NCHW, size), maps.label_N, CPU)
    weight_DC, bias_D = discriminants(part_scatter(BACKBONE, same, place_Nm, shown_Nm), CHANNELS)
    assert weight_DC.isfinite().all()
    assert bias_D.isfinite().all()


def test_directions_that_classes_do_not_differ_in_count_least() -> None:
    """Two of four channels tell classes apart, one of them twice as well; patches vary most in a third."""
    within, between = torch.diag(torch.tensor([1.0, 1, 2, 1])), torch.diag(torch.tensor([4.0, 0, 0, 2]))
    weight_DC, bias_D = discriminants(Scatter(torch.ones(4).double(), within.double(), between.double()), 3)
    ridge = SHRINKAGE * (1.25 + 1e-6 * 1.5)
    apart, varies = (0.0 + REST * 2, 2 + REST, 4 + REST), (2 + ridge, 1 + ridge, 1 + ridge)
    assert (weight_DC != 0).tolist() == [[False, False, True, False], [False, False, False, True], [True, *[False] * 3]]
    for weight_C, between_, within_ in zip(weight_DC, apart, varies, strict=True):
        ratio = between_ / within_
        assert float(weight_C.abs().max()) == pytest.approx((ratio / (ratio + 1) / within_) ** 0.5)
    assert torch.equal(bias_D, -weight_DC.sum(1))


def test_pictures_and_their_kept_maps_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "EVAL_BATCH", 4)  # several batches, the last one smaller
    images, backbone = random_images(11, 3), tiny_model([1, 1, 1]).eval().backbone
    _, place_Nm, shown_Nm = some_maps(1, 11, 3, 2)
    with torch.no_grad():
        seen = part_scatter(backbone, images, place_Nm, shown_Nm)
        kept = part_scatter(backbone, keep_feature_maps(backbone, images, torch.arange(11)), place_Nm, shown_Nm)
    for one, other in zip(vars(seen).values(), vars(kept).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
