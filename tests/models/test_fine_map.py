"""Maps with smaller cells."""

from __future__ import annotations

import pytest
import torch

from likethat.models.backbone import create_backbone


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
