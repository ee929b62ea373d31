"""Colours for activation maps."""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image
from torch import Tensor

from likethat.explaining.boxes import upsample

LEAST_OPAQUE, MOST_OPAQUE = 0.30, 0.80  # how much of the picture the coldest and the hottest colour hide


@cache
def colour_table(name: str = "ember") -> np.ndarray:
    """Return 256 RGB colours from cold to hot. 'ember' gets lighter in equal steps of perceived lightness; 'jet' is
    the rainbow of the paper's figures, which does not."""
    t_n = np.linspace(0, 1, 256)
    if name == "jet":
        rgb_n3 = np.clip(1.5 - np.abs(4 * t_n[:, None] - np.array([3, 2, 1])), 0, 1)
    else:
        assert name == "ember"
        lightness, hue = 0.28 + 0.66 * t_n, np.radians(285 + 180 * t_n)
        chroma = 0.10 + 0.30 * t_n * (1 - t_n)
        rgb_n3 = _oklab_to_srgb(np.stack([lightness, chroma * np.cos(hue), chroma * np.sin(hue)], 1))
    return np.round(255 * rgb_n3).astype(np.uint8)


def _oklab_to_srgb(lab_n3: np.ndarray) -> np.ndarray:
    """Convert from Björn Ottosson's OKLab, in which equal steps look equal."""
    cone_n3 = lab_n3 @ np.array(
        [[1, 1, 1], [0.3963377774, -0.1055613458, -0.0894841775], [0.2158037573, -0.0638541728, -1.2914855480]]
    )
    linear_n3 = cone_n3**3 @ np.array(
        [
            [4.0767416621, -1.2684380046, -0.0041960863],
            [-3.3077115913, 2.6097574011, -0.7034186147],
            [0.2309699292, -0.3413193965, 1.7076147010],
        ]
    )
    linear_n3 = np.clip(linear_n3, 0, 1)
    return np.where(linear_n3 <= 0.0031308, 12.92 * linear_n3, 1.055 * linear_n3 ** (1 / 2.4) - 0.055)


def heat_layer(map_HW: Tensor, size_wh: tuple[int, int], colours: str = "ember") -> Image.Image:
    """Return the map, upsampled and stretched from its least to its greatest value, as an RGBA layer for a picture."""
    width, height = size_wh
    heat_HW = upsample(map_HW[None].float(), (height, width))[0].numpy()
    low, high = float(map_HW.min()), float(map_HW.max())
    heat_HW = np.clip((heat_HW - low) / max(high - low, 1e-12), 0, 1)
    alpha_HW1 = 255 * (LEAST_OPAQUE + (MOST_OPAQUE - LEAST_OPAQUE) * heat_HW)[..., None]
    rgb_HW3 = colour_table(colours)[np.round(255 * heat_HW).astype(int)]
    return Image.fromarray(np.concatenate([rgb_HW3, np.round(alpha_HW1).astype(np.uint8)], 2))


def overlay(picture: Image.Image, map_HW: Tensor, colours: str = "ember") -> Image.Image:
    """Lay the heat map over the picture. The picture's colours are subdued, so that they do not read as heat."""
    grey = Image.blend(picture, picture.convert("L").convert("RGB"), 0.7).convert("RGBA")
    return Image.alpha_composite(grey, heat_layer(map_HW, picture.size, colours)).convert("RGB")
