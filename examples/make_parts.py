"""Draw a factory's pictures, in place of real ones: washers on a belt, most of them good, few scratched.

python examples/make_parts.py parts
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SIDE = 160


def draw_washer(rng: np.random.Generator, scratched: bool) -> Image.Image:
    """Return a ring of brushed metal on a dark belt, with a bright line across it where it is scratched."""
    belt = _noise(rng, 45, 6)
    cx, cy = rng.uniform(0.42, 0.58, 2) * SIDE
    outer = rng.uniform(0.3, 0.36) * SIDE
    inner = outer * rng.uniform(0.42, 0.5)
    metal = _noise(rng, 128, 30).filter(ImageFilter.BoxBlur(2))
    ring = Image.new("L", (SIDE, SIDE), 0)
    pen = ImageDraw.Draw(ring)
    pen.ellipse((cx - outer, cy - outer, cx + outer, cy + outer), fill=255)
    pen.ellipse((cx - inner, cy - inner, cx + inner, cy + inner), fill=0)
    picture = Image.composite(metal, belt, ring)
    if scratched:
        angle, turn = rng.uniform(0, 2 * np.pi), rng.uniform(-0.6, 0.6)
        middle = (outer + inner) / 2
        x, y = cx + middle * np.cos(angle), cy + middle * np.sin(angle)
        reach = 0.55 * (outer - inner)
        dx, dy = reach * np.cos(angle + turn), reach * np.sin(angle + turn)
        ImageDraw.Draw(picture).line((x - dx, y - dy, x + dx, y + dy), fill=(245, 245, 240), width=3)
    return picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 0.8)))


def _noise(rng: np.random.Generator, middle: float, spread: float) -> Image.Image:
    gray_HW = rng.normal(middle, spread, (SIDE, SIDE)).clip(0, 255).astype(np.uint8)
    return Image.fromarray(gray_HW).convert("RGB")


def main(folder: Path, good: int = 240, scratched: int = 24) -> None:
    """Write a folder of pictures for each class."""
    rng = np.random.default_rng(0)
    for name, count in (("good", good), ("scratched", scratched)):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            draw_washer(rng, name == "scratched").save(folder / name / f"{number:04}.png")
    print(f"{folder}: {good} good parts, {scratched} scratched ones")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
