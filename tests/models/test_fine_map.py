"""Maps with smaller cells, and where cells look."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from likethat.models.backbone import create_backbone
from likethat.models.fine_map import looking_offset


@pytest.mark.parametrize(
    ("name", "size", "coarse", "fine"),
    [
        ("resnet18", 64, 2, 4),  # a convolution and the shortcut beside it
        ("vgg11", 64, 2, 4),  # a pool of windows side by side
        ("densenet121", 64, 2, 4),  # an average of them
        ("tf_efficientnet_lite0", 96, 3, 6),  # a convolution that pads as it runs
        ("convnext_atto", 64, 2, 3),  # a convolution without padding
        ("vit_tiny_patch16_224", 64, 4, 4),  # tokens have no such stride
    ],
)
def test_the_last_stride_is_taken_back_and_weights_still_fit(name: str, size: int, coarse: int, fine: int) -> None:
    plain = create_backbone(name, "none", (size, size))
    finer = create_backbone(name, "none", (size, size), fine_map=True)
    assert plain.map_size == (coarse, coarse)
    assert finer.map_size == (fine, fine)
    finer.load_state_dict(plain.state_dict())


def test_nothing_before_the_last_stage_changes() -> None:
    plain, finer = (create_backbone("resnet18", "none", (64, 64), fine_map=fine).eval() for fine in (False, True))
    finer.load_state_dict(plain.state_dict())
    x_B3HW, seen = torch.rand(2, 3, 64, 64), []
    for backbone in (plain, finer):
        backbone.net.layer3.register_forward_hook(lambda module, inputs, output: seen.append(output))
        backbone(x_B3HW)
    torch.testing.assert_close(*seen)


@pytest.mark.parametrize(
    ("layer", "offset"),
    [
        (nn.Conv2d(3, 4, 3, stride=2, padding=1), -0.25),  # cell i has its middle on pixel 2i: a quarter cell off
        (nn.Sequential(*[nn.Conv2d(3, 3, 3, stride=2, padding=1) for _ in range(4)]), -0.5),  # 15/32 of a cell
        (nn.Conv2d(3, 4, 2, stride=2), 0.0),
        (nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 3, 3, stride=2)), 0.25),
    ],
)
def test_cells_look_where_strides_and_padding_put_them(layer: nn.Module, offset: float) -> None:
    for module in layer.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.ones_(module.weight)  # all pixels of a window count alike
    found = looking_offset(layer, (64, 64))
    assert found == (round(2 * offset) / 2,) * 2 or abs(found[0] - offset) <= 0.25


def test_known_networks_look_half_a_cell_to_either_side_or_straight_ahead() -> None:
    offsets = {
        name: create_backbone(name, "none", (96, 96), fine_map=True, centred=True).offset
        for name in ("resnet18", "tf_efficientnet_lite0", "vgg11")
    }
    assert offsets == {"resnet18": (-0.5, -0.5), "tf_efficientnet_lite0": (0.5, 0.5), "vgg11": (0.0, 0.0)}
    assert create_backbone("resnet18", "none", (96, 96)).offset == (0.0, 0.0), "drawn as published unless asked for"
