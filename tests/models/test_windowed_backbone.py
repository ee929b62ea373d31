"""Backbones whose cells see windows: the same as looking at every window alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from likethat.errors import UserError
from likethat.models.backbone import Backbone, create_backbone


def pair(name: str = "test_resnet") -> tuple[Backbone, Backbone]:
    """A backbone of a 64x96 picture that sees windows of 32 px every 16, and one of such windows with its weights."""
    windowed = create_backbone(name, "none", (64, 96), (32, 16)).eval()
    alone = create_backbone(name, "none", (32, 32)).eval()
    alone.load_state_dict(windowed.state_dict())
    return windowed, alone


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "test_vit"])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_cell_is_the_mean_of_the_map_of_its_window_alone(name: str, gradients: bool) -> None:
    windowed, alone = pair(name)
    assert (windowed.map_size, windowed.input_size, windowed.channels) == ((3, 5), (64, 96), alone.channels)
    x = torch.rand(5, 3, 64, 96)
    with torch.set_grad_enabled(gradients):
        found = windowed(x)
    assert found.shape == (5, alone.channels, 3, 5)
    with torch.no_grad():
        for row in range(3):
            for column in range(5):
                window = x[:, :, 16 * row : 16 * row + 32, 16 * column : 16 * column + 32]
                torch.testing.assert_close(found[:, :, row, column], alone(window).mean((2, 3)), atol=1e-5, rtol=1e-4)


def test_pixels_outside_a_window_do_not_touch_its_cell() -> None:
    """To the last bit, however other cells change."""
    windowed, _ = pair()
    x = torch.rand(2, 3, 64, 96)
    other = torch.rand(2, 3, 64, 96)
    other[:, :, 16:48, 32:64] = x[:, :, 16:48, 32:64]
    with torch.no_grad():
        before, after = windowed(x), windowed(other)
    assert torch.equal(before[:, :, 1, 2], after[:, :, 1, 2])
    assert ((before != after).any(1).sum((0, 1, 2)) == 2 * 14).all()


def test_batch_statistics_are_those_of_all_windows() -> None:
    windowed, alone = pair()
    windowed.train()
    alone.train()
    x = torch.rand(3, 3, 64, 96)
    windows = [
        x[b, :, 16 * row : 16 * row + 32, 16 * column : 16 * column + 32]
        for b in range(3)
        for row in range(3)
        for column in range(5)
    ]
    with torch.no_grad():
        found, expected = windowed(x), alone(torch.stack(windows)).mean((2, 3))
    torch.testing.assert_close(found.permute(0, 2, 3, 1).flatten(0, 2), expected, atol=1e-5, rtol=1e-4)
    statistics = [[m.running_mean for m in net.modules() if isinstance(m, nn.BatchNorm2d)] for net in (windowed, alone)]
    for ours, theirs in zip(*statistics, strict=True):
        assert ours is not None
        assert float(ours.abs().sum()) > 0
        torch.testing.assert_close(ours, theirs)


def test_passes_without_gradients_look_at_few_windows_at_a_time() -> None:
    windowed, _ = pair()
    seen: list[int] = []
    windowed.net.conv1.register_forward_pre_hook(lambda _, given: seen.append(given[0].numel()))
    x = torch.rand(8, 3, 64, 96)
    with torch.no_grad():
        windowed(x)
    assert max(seen) <= x.numel()
    assert sum(seen) == 8 * 15 * 3 * 32 * 32


def test_windows_too_small_for_the_network_are_told() -> None:
    with pytest.raises(UserError, match="test_vit does not take 20x20 windows, so change the size in --windows"):
        create_backbone("test_vit", "none", (40, 40), (20, 20))
