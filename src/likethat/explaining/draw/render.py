"""Small pictures: the part that a network saw, thumbnails, and boxes drawn on them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from likethat.data.decode import Box, ImageError, View, read_image
from likethat.data.files import read_file
from likethat.errors import UserError

LIGHT, DARK = (255, 214, 10), (20, 20, 20)
MOST_BYTES = 500_000  # of a picture that is sent by mail
A4_WIDTH = 210 / 25.4  # inches


def read_picture(run: Path, name: str) -> Image.Image:
    """Read a prototype's picture in the run folder."""
    try:
        return read_image(run / name)
    except ImageError as error:
        raise _lost(run / name) from error


def read_jpeg(run: Path, name: str) -> tuple[bytes, tuple[int, int]]:
    """Return the file of a prototype's picture as it is, and its width and height, without decoding it."""
    try:
        data = read_file(run / name)
        return data, Image.open(io.BytesIO(data), formats=("JPEG",)).size
    except Exception as error:  # Pillow raises nearly everything on broken data
        raise _lost(run / name) from error


def _lost(path: Path) -> UserError:
    return UserError(f"{path}, a prototype's picture, cannot be read; restore the run folder.")


def seen_part(image: Image.Image, view: View) -> Image.Image:
    """Return the part of the upright picture that the network saw, before it was squeezed into the input's shape."""
    return image.crop(view.crop)


def shrink(image: Image.Image, longest: int) -> Image.Image:
    """Shrink the picture to at most `longest` pixels on the longer side; never enlarge it."""
    return image if longest >= max(image.size) else fit(image, longest)


def fit(image: Image.Image, side: int) -> Image.Image:
    """Scale the picture, up or down, so that the longer side has `side` pixels."""
    scale = side / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3)


def scaled(box: Box, width: float, height: float) -> Box:
    """Convert a box in shares of a picture to pixels of one of this size."""
    return box[0] * width, box[1] * height, box[2] * width, box[3] * height


def in_shares(box: Box, width: float, height: float) -> Box:
    """Convert a box in pixels of a picture of this size to shares of it."""
    return box[0] / width, box[1] / height, box[2] / width, box[3] / height


def cut_out(image: Image.Image, share: Box) -> Image.Image:
    """Return the part of the picture inside a box in shares of it, at least one pixel each way."""
    x0, y0, x1, y1 = (round(value) for value in scaled(share, *image.size))
    x0, y0 = min(x0, image.width - 1), min(y0, image.height - 1)
    return image.crop((x0, y0, max(x1, x0 + 1), max(y1, y0 + 1)))


def draw_box(image: Image.Image, box: Box, line: int = 2) -> Image.Image:
    """Return a copy with the box's outline: light inside dark, to be seen on any ground."""
    image = image.copy()
    x0, y0 = max(0, round(box[0])), max(0, round(box[1]))
    x1, y1 = min(image.width, round(box[2])) - 1, min(image.height, round(box[3])) - 1
    x1, y1 = max(x0, x1), max(y0, y1)
    draw = ImageDraw.Draw(image)
    for inset, colour in enumerate([DARK] * (line // 2) + [LIGHT] * line + [DARK] * (line // 2)):
        if x1 - x0 >= 2 * inset and y1 - y0 >= 2 * inset:
            draw.rectangle((x0 + inset, y0 + inset, x1 - inset, y1 - inset), outline=colour)
    return image


def encode(image: Image.Image, form: str, **options: Any) -> bytes:
    """Return the picture as a file of a form that Pillow knows, with Pillow's options for it."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def jpeg(image: Image.Image, quality: int = 88) -> bytes:
    # Colour in full resolution: these pictures are small, and feather by feather is what people look at.
    # Not optimized: Pillow then needs the file to fit a buffer, which that of a noisy picture does not.
    return encode(image, "JPEG", quality=quality, subsampling=0)


def png(image: Image.Image) -> bytes:
    return encode(image, "PNG", compress_level=1)  # two times faster than Pillow's own choice and a tenth larger


def small_png(image: Image.Image) -> bytes:
    """Return a PNG of at most MOST_BYTES, with as many colours as it then can have."""
    data = png(image)
    for colours in (256, 128, 64, 32, 16):
        if len(data) <= MOST_BYTES:
            break
        data = encode(image.quantize(colours), "PNG", optimize=True)
    return data


def pdf(image: Image.Image) -> bytes:
    """Return a PDF of one page as wide as A4, which holds the picture as a JPEG."""
    return encode(image, "PDF", resolution=image.width / A4_WIDTH, quality=88, subsampling=0)
