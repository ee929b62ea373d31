"""Paints layers that have masks: outlines in pixels are filled large and averaged down, which gives smooth edges.

The canvas remembers how much of each pixel still shows each named part, so a part's true place is known at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Array = NDArray[np.float32]
Points = NDArray[np.float64]
Colour = tuple[int, int, int]

SUPERSAMPLE = 3


@dataclass
class BirdCanvas:
    """The picture so far and, for every part, how much of each pixel still shows it."""

    rgb: Array  # 3 planes of 0 to 255
    visible: dict[str, Array] = field(default_factory=dict)


def planes(colour: Colour | Array) -> Array:
    """Return a colour, or a picture, as three planes: plane by plane is several times faster than pixel by pixel."""
    array = np.asarray(colour, np.float32)
    return array[:, None, None] if array.ndim == 1 else array


def paint(canvas: BirdCanvas, alpha: Array, colour: Colour | Array, part: str | None = None) -> None:
    """Lay a colour over the picture; what it covers of earlier parts is no longer visible."""
    rows, columns = np.flatnonzero(alpha.any(1)), np.flatnonzero(alpha.any(0))
    if len(rows) == 0:
        return
    window = np.s_[..., rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]  # most layers are small
    over = alpha[window]
    ink = planes(colour)
    for mask in canvas.visible.values():
        mask[window] *= 1 - over
    canvas.rgb[window] += over * ((ink[window] if ink.shape[1:] == alpha.shape else ink) - canvas.rgb[window])
    if part is not None:
        canvas.visible.setdefault(part, np.zeros_like(alpha))[window] += over


def smooth(points: Points, closed: bool = True, steps: int = 8) -> Points:
    """Return a Catmull-Rom curve through the points."""
    p = np.asarray(points, float)
    before, after = (p[-1:], p[:2]) if closed else (2 * p[:1] - p[1:2], 2 * p[-1:] - p[-2:-1])
    p = np.concatenate([before, p, after])
    t = np.linspace(0, 1, steps, endpoint=False)[None, :, None]
    a, b, c, d = (p[i : len(p) - 3 + i, None] for i in range(4))
    curve = b + 0.5 * t * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a)))
    return np.concatenate([curve.reshape(-1, 2), p[-2:-1]])


def stroke(points: Points, start: float, end: float) -> Points:
    """Return the outline of a line whose width goes from start to end."""
    p = np.asarray(points, float)
    along = np.gradient(p, axis=0)
    across = np.stack([-along[:, 1], along[:, 0]], 1) / (np.hypot(*along.T)[:, None] + 1e-9)
    half = np.linspace(start, end, len(p))[:, None] / 2
    return np.concatenate([p + across * half, (p - across * half)[::-1]])


def rotate(points: Points, angle: float) -> Points:
    """Return the points turned about the origin, from x towards y."""
    c, s = np.cos(angle), np.sin(angle)
    return np.asarray(points, float) @ np.array([[c, s], [-s, c]])


def fill(size: int, *outlines: Points) -> Array:
    """Return the mask (0 to 1) of the outlines, given in pixels."""
    mask = np.zeros((size, size), np.float32)
    every = np.concatenate(outlines)
    x0, y0 = np.floor(every.min(0)).clip(0, size).astype(int).tolist()
    x1, y1 = (np.floor(every.max(0)) + 1).clip(0, size).astype(int).tolist()
    if x0 < x1 and y0 < y1:
        window = Image.new("L", ((x1 - x0) * SUPERSAMPLE, (y1 - y0) * SUPERSAMPLE))
        draw = ImageDraw.Draw(window)
        for outline in outlines:
            draw.polygon(((outline - [x0, y0]) * SUPERSAMPLE).ravel().tolist(), fill=255)
        mask[y0:y1, x0:x1] = np.asarray(window.reduce(SUPERSAMPLE), np.float32) / 255
    return mask


def blur(mask: Array, radius: float) -> Array:
    """Blur a mask by sampling it down to cells of the radius and up again: smooth, in floating point, and fast."""
    size = mask.shape[0]
    cells = min(size - 1, max(2, round(size / radius)))
    small = Image.fromarray(mask).resize((cells, cells), Image.Resampling.HAMMING)
    return np.asarray(small.resize((size, size), Image.Resampling.BICUBIC), np.float32)


def scallops(points: Points, count: int, depth: float) -> Points:
    """Return a band of rounded feather tips along a row."""
    line = smooth(points, False, steps=16)
    along = np.gradient(line, axis=0)
    across = np.stack([along[:, 1], -along[:, 0]], 1) / (np.hypot(*along.T)[:, None] + 1e-9)
    phase = np.linspace(0, count, len(line))
    tips = np.sqrt(np.abs(np.sin(np.pi * phase)))[:, None]
    return np.concatenate([line, (line + across * depth * (0.55 + 0.45 * tips))[::-1]])


def streaks(size: int, length: int, rng: np.random.Generator) -> Array:
    """Draw noise of about unit variance, drawn out along x: feather barbs, the grain of bark."""
    noise = Image.fromarray(rng.standard_normal((size, size // length + 1), np.float32))
    return np.asarray(noise.resize((size, size), Image.Resampling.BICUBIC), np.float32)
