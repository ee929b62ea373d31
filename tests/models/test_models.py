"""The forward pass against a literal, slow reading of the paper; backbones; weights."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest
import torch
from helpers.tiny import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from likethat.config.presets import resolve
from likethat.errors import UserError
from likethat.models.backbone import create_backbone
from likethat.models.protopnet import create_add_on
from likethat.models.prototypes import PrototypeLayer, bfloat16_parts, squared_distances


@pytest.mark.parametrize(
    ("similarity", "window"),
    [("log", (1, 1)), ("log", (2, 1)), ("log", (3, 3)), ("linear", (1, 1)), ("cosine", (1, 2))],
)
def test_forward_is_the_papers_definition(similarity: str, window: tuple[int, int]) -> None:
    """max over patches of the similarity, patch by patch in float64, times the last layer, for uneven classes."""
    model = tiny_model([1, 4, 2], similarity=similarity, prototype_shape=window).eval()
    x = torch.rand(2, 3, 96, 96)
    with torch.no_grad():
        output, z = model(x), model.latent(x).double()
    prototypes = model.prototype_layer.prototype_PDhw.detach().double()
    height, width = 3 - window[0] + 1, 3 - window[1] + 1
    for b in range(2):
        scores = []
        for p in range(7):
            best = -math.inf
            for row in range(height):
                for column in range(width):
                    patch = z[b, :, row : row + window[0], column : column + window[1]]
                    if similarity == "cosine":
                        cosine = (patch * prototypes[p]).sum() / (patch.norm() * prototypes[p].norm())
                        value = max(0.0, float(cosine))
                    else:
                        distance = float(((patch - prototypes[p]) ** 2).sum())
                        value = math.log((distance + 1) / (distance + 1e-4)) if similarity == "log" else -distance
                    assert float(output.similarity_BPHW[b, p, row, column]) == pytest.approx(value, abs=1e-4)
                    best = max(best, value)
            scores.append(best)
            assert float(output.score_BP[b, p]) == pytest.approx(best, abs=1e-4)
        for k, own in enumerate([[0], [1, 2, 3, 4], [5, 6]]):
            logit = sum(score * (1.0 if p in own else -0.5) for p, score in enumerate(scores))
            assert float(output.logits_BK[b, k]) == pytest.approx(logit, abs=1e-3)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.01, 30), st.floats(0, 1e-2))
def test_distances_are_exact_near_zero(seed: int, length: float, step: float) -> None:
    """The expanded square must not lose the small distances that the log similarity lives on."""
    generator = torch.Generator().manual_seed(seed)
    prototype = torch.rand(5, 32, generator=generator) * length
    patch = (prototype[:1] + step * torch.randn(1, 32, generator=generator)).view(1, 32, 1, 1)
    exact = (patch.view(1, 32).double() - prototype.double()).square().sum(1)
    got = squared_distances(patch, prototype).distances().view(5)
    assert (got.double() - exact).abs().max() <= 2e-6 * max(1.0, float(exact.max()))
    assert (got >= 0).all()


def test_distances_ignore_autocast() -> None:
    patch, prototype = torch.rand(2, 64, 3, 3), torch.rand(7, 64)
    with torch.autocast("cpu", torch.bfloat16):
        inside = squared_distances(patch, prototype).distances()
    assert inside.dtype == torch.float32
    assert torch.equal(inside, squared_distances(patch, prototype).distances())


@pytest.mark.parametrize(
    ("name", "size", "map_size", "channels"),
    [
        ("vgg19", (64, 96), (2, 3), 512),
        ("resnet34", (64, 96), (2, 3), 512),
        ("densenet121", (64, 64), (2, 2), 1024),
        ("convnext_tiny", (64, 96), (2, 3), 768),
        ("tf_efficientnet_lite0", (96, 64), (3, 2), 1280),
        ("vit_tiny_patch16_224", (64, 96), (4, 6), 192),
        ("swin_tiny_patch4_window7_224", (224, 224), (7, 7), 768),
    ],
)
def test_backbones_yield_maps(name: str, size: tuple[int, int], map_size: tuple[int, int], channels: int) -> None:
    backbone = create_backbone(name, "none", size)
    assert (backbone.map_size, backbone.channels) == (map_size, channels)
    backbone(torch.rand(2, 3, *size)).sum().backward()
    assert all(parameter.grad is not None for parameter in backbone.parameters()), "a parameter serves nothing"


def test_token_grid_keeps_the_picture_upright() -> None:
    """A bright spot in one corner must show in the same corner of a ViT's map."""
    backbone = create_backbone("vit_tiny_patch16_224", "none", (64, 96)).eval()
    dark, spot = torch.zeros(1, 3, 64, 96), torch.zeros(1, 3, 64, 96)
    spot[:, :, :16, 80:] = 1
    with torch.no_grad():
        change = (backbone(spot) - backbone(dark)).square().sum(1)[0]
    assert divmod(int(change.argmax()), 6) == (0, 5)


def test_bottleneck_halves_until_d() -> None:
    widths = [layer.out_channels for layer in create_add_on("bottleneck", 512, 128) if hasattr(layer, "out_channels")]
    assert widths == [256, 256, 128, 128]


def test_embedded_weights_are_imagenets() -> None:
    """Real weights: features of two different pictures differ, and BatchNorm statistics are not the initial ones."""
    net = create_backbone("tf_efficientnet_lite0", "pretrained", (64, 64)).net
    assert float(net.bn1.running_mean.abs().sum()) > 1
    assert not torch.equal(net.bn1.running_var, torch.ones_like(net.bn1.running_var))


def test_weights_from_files(tmp_path: Path) -> None:
    source = create_backbone("test_resnet", "none", (64, 64))
    state = source.net.state_dict()
    save_file(state, tmp_path / "w.safetensors")
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "w.pth")
    x = torch.rand(1, 3, 64, 64)
    for file in ("w.safetensors", "w.pth"):
        copy = create_backbone("test_resnet", str(tmp_path / file), (64, 64))
        assert torch.equal(copy.eval()(x), source.eval()(x))
        assert copy.began_with == f"{file}, SHA-256 {hashlib.sha256((tmp_path / file).read_bytes()).hexdigest()}"
    assert source.began_with == "random weights"


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("pickled code ran",))


def test_weights_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": Evil()}, tmp_path / "evil.pth")
    (tmp_path / "text.safetensors").write_text("no tensors")
    save_file({"conv1.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    for file, words in [
        ("evil.pth", "weights-only"),
        ("text.safetensors", "safetensors"),
        ("other.safetensors", "do not fit"),
        ("missing.pth", "does not exist"),
    ]:
        with pytest.raises(UserError, match=words):
            create_backbone("test_resnet", str(tmp_path / file), (64, 64))
    assert "pickled code ran" not in capsys.readouterr().out
    with pytest.raises(UserError, match="no spatial map"):
        create_backbone("coat_tiny", "none", (64, 64))  # gives a list
    with pytest.raises(UserError, match="no timm model"):
        create_backbone("resnet_9000", "none", (64, 64))


@pytest.mark.parametrize(
    ("backbone", "weights", "asked"),
    [
        ("resnet34", "torchvision", "resnet34.tv_in1k"),
        ("densenet121", "torchvision", "densenet121.tv_in1k"),
        ("resnet34", "pretrained", "resnet34.a1_in1k"),
        ("resnet34.bt_in1k", "torchvision", "resnet34.bt_in1k"),  # the user's own word
        ("mobilenetv3_small_050", "torchvision", "mobilenetv3_small_050.lamb_in1k"),  # timm has no others
    ],
)
def test_timm_is_asked_for_the_weights_of_the_paper(
    backbone: str, weights: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no hub here, so what it would give are random weights; the name that it is asked for is timm's."""
    monkeypatch.setattr("timm.models._builder.load_pretrained", lambda *args, **kwargs: None)
    assert create_backbone(backbone, weights, (64, 64)).began_with == f"timm {asked}"
    assert resolve("paper").model.weights == "torchvision"


def test_weights_that_cannot_be_had_name_three_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))  # not what was downloaded earlier
    with pytest.raises(UserError) as caught:
        create_backbone("resnet18", "pretrained", (64, 64))
    for way in ("internet", "--weights FILE", "--weights none"):
        assert way in str(caught.value)


def test_prototypes_larger_than_the_map_are_refused() -> None:
    with pytest.raises(UserError, match="do not fit"):
        tiny_model([1, 1], prototype_shape=(4, 1))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32, min_value=-1, max_value=1), min_size=1, max_size=20))
def test_three_parts_hold_every_number(values: list[float]) -> None:
    """Down to where bfloat16 and float32 end alike."""
    vector = torch.tensor([[value for value in values if abs(value) > 1e-30 or value == 0]])
    parts = bfloat16_parts(vector)
    assert all(part.dtype == torch.bfloat16 for part in parts)
    assert torch.equal(sum(part.double() for part in parts), vector.double())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16 products with fp32 sums need a CUDA GPU")
def test_distances_in_bfloat16_are_those_in_fp32() -> None:
    layer = PrototypeLayer([0, 0, 1], 512, (1, 1), "cosine").cuda()
    z_BDHW = torch.randn(5, 512, 4, 3, device="cuda").bfloat16()
    z_BDHW[0, :, 0, 0] = layer.prototype_PDhw[1, :, 0, 0]
    with torch.no_grad():
        mixed, exact = layer(z_BDHW), layer(z_BDHW.float())
    torch.testing.assert_close(mixed.distances(), exact.distances(), rtol=0, atol=2e-6)
    torch.testing.assert_close(mixed.smallest(), exact.smallest(), rtol=0, atol=2e-6)


def test_a_shifted_network_sees_pictures_moved_up_and_left() -> None:
    plain, shifted = (create_backbone("test_resnet", "none", (64, 64), shift=pixels).eval() for pixels in (0, 5))
    shifted.load_state_dict(plain.state_dict())
    x_B3HW = torch.rand(2, 3, 64, 64)
    row_64 = (torch.arange(64) + 5).clamp(max=63)
    torch.testing.assert_close(shifted(x_B3HW), plain(x_B3HW[:, :, row_64][:, :, :, row_64]))
