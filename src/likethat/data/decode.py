"""From a picture file to the network's input, and from the input's pixels back to the file's."""

import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

# The plug-ins are imported here because Pillow would otherwise load them on first use, in many threads at once.
from PIL import (
    BmpImagePlugin,  # noqa: F401
    ExifTags,
    GifImagePlugin,  # noqa: F401
    Image,
    JpegImagePlugin,  # noqa: F401
    PngImagePlugin,  # noqa: F401
    TiffImagePlugin,  # noqa: F401
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401
)

from likethat.data.files import read_file
from likethat.errors import UserError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MAX_SIDE = 20_000
MAX_PIXELS = 178_000_000

# Pillow warns from half its own limit on; here only the limits above count, and they are checked for every picture.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

Box = tuple[float, float, float, float]  # x0, y0, x1, y1; a pixel covers the unit square right of and below its index

# How the pixels of a file with this EXIF orientation are turned upright.
_TURN_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(UserError):
    """A picture that cannot be used. `kind` is one of unreadable, truncated, empty, bomb."""

    def __init__(self, name: str, kind: str, cause: str) -> None:
        super().__init__(name, kind, cause)
        self.name, self.kind, self.cause = name, kind, cause

    def __str__(self) -> str:
        return f"{self.name}: {self.cause}"


def read_image(
    source: Path | bytes | BinaryIO | Image.Image, *, name: str | None = None, max_pixels: int = MAX_PIXELS
) -> Image.Image:
    """Read the picture, upright and in RGB; `name` is what an error calls it.

    Transparent parts are laid on white, animations give their first frame. 16-bit pictures are scaled to 8 bits;
    32-bit and float pictures have no agreed range, see `_to_8_bits`. `info["orientation"]` of the result keeps
    the EXIF orientation the file had, so that `to_input` can map back to the file's pixels.
    """
    name = name or _name_of(source)
    data = b""
    try:
        if isinstance(source, Image.Image):
            image = source
        else:
            data = _read_bytes(source, name)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        if max(image.size) > MAX_SIDE or image.width * image.height > max_pixels:
            raise _too_large(name, max_pixels)
        rgb, orientation = _upright_rgb(image)
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise _too_large(name, max_pixels) from error
    except Exception as error:  # Pillow's decoders raise nearly everything on broken data
        raise _broken(name, data, error) from error
    if rgb is source:  # the caller's own image keeps its info
        rgb = rgb.copy()
    rgb.info = {"orientation": orientation}
    return rgb


def _name_of(source: Path | bytes | BinaryIO | Image.Image) -> str:
    if isinstance(source, Path):
        return str(source)
    return str(getattr(source, "filename", "") or getattr(source, "name", "") or "the image")


def _read_bytes(source: Path | bytes | BinaryIO, name: str) -> bytes:
    if isinstance(source, Path):
        try:
            data = read_file(source)
        except OSError as error:
            raise ImageError(name, "unreadable", f"cannot be opened ({error.strerror or error})") from error
    else:
        data = source if isinstance(source, bytes) else source.read()
    if not data:
        raise ImageError(name, "empty", "the file is empty (0 bytes); copy it again or delete it")
    return data


def _too_large(name: str, max_pixels: int) -> ImageError:
    limits = f"more than {MAX_SIDE:,} pixels on a side or {max_pixels // 1_000_000} million in all"
    return ImageError(name, "bomb", f"{limits}; scale it down or delete it")


def _broken(name: str, data: bytes, error: Exception) -> ImageError:
    riff_is_short = data[:4] == b"RIFF" and len(data) < int.from_bytes(data[4:8], "little") + 8
    if "truncated" in str(error).lower() or riff_is_short:
        return ImageError(name, "truncated", "the file ends too early; copy it again or delete it")
    if data[:512].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        why = "it is a web page"
    elif isinstance(error, UnidentifiedImageError):
        why = "its content is none of these"
    else:
        why = str(error) or type(error).__name__
    readable = "not a readable JPEG, PNG, WebP, GIF, BMP or TIFF picture"
    return ImageError(name, "unreadable", f"{readable} ({why}); convert it or delete it")


def _upright_rgb(image: Image.Image) -> tuple[Image.Image, int]:
    """Return the picture, and the EXIF orientation its file had."""
    orientation = image.info.get("orientation", 1)
    if image.format == "TIFF":  # Pillow turns TIFF upright while it loads, and forgets how it was
        orientation = _exif_orientation(image)
    image.load()
    turn = _exif_orientation(image)
    rgb = _to_rgb(image)
    if turn == 1:
        return rgb, orientation
    return rgb.transpose(_TURN_UPRIGHT[turn]), turn


def _exif_orientation(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # broken EXIF: the pixels are good, and viewers show them as they lie
        return 1
    return int(orientation) if orientation in range(1, 9) else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_to_8_bits(np.asarray(image)))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_8_bits(values_HW: np.ndarray) -> np.ndarray:
    """Convert 16-bit, 32-bit or float gray to 8 bits.

    16-bit values, and 32-bit values that fit into 16 bits (how Pillow hands over some 16-bit files), are divided
    by 257. Floats within 0..1 are multiplied by 255, floats within 0..255 kept. Everything else is stretched
    from its least to its greatest value. What is not finite becomes black.
    """
    is_float = values_HW.dtype.kind == "f"
    values_HW = values_HW.astype(np.float64)
    finite_HW = np.isfinite(values_HW)
    low = values_HW.min(where=finite_HW, initial=np.inf)
    high = values_HW.max(where=finite_HW, initial=-np.inf)
    known_tops = (1.0, 255.0) if is_float else (65535.0,)
    top = next((top for top in known_tops if low >= 0 and high <= top), None)
    if top is None:
        values_HW, top = values_HW - low, max(high - low, 1.0)
    # Rounded half up: 257 * k gives exactly k, and the steps are of equal width.
    return np.where(finite_HW, np.floor(values_HW * (255.0 / top) + 0.5), 0).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class View:
    """The way from a file's pixels to the network's input: turned upright, cropped, resized."""

    crop: tuple[int, int, int, int]  # x0, y0, x1, y1 in the upright picture
    input_hw: tuple[int, int]
    upright_hw: tuple[int, int]
    orientation: int = 1  # EXIF, 1 to 8

    def to_upright(self, box: Box) -> Box:
        """Convert a box in input pixels to pixels of the upright picture."""
        left, top, right, bottom = self.crop
        scale_y, scale_x = (bottom - top) / self.input_hw[0], (right - left) / self.input_hw[1]
        x0, y0, x1, y1 = box
        return left + x0 * scale_x, top + y0 * scale_y, left + x1 * scale_x, top + y1 * scale_y

    def to_shares(self, upright_n4: np.ndarray) -> np.ndarray:
        """Convert boxes in pixels of the upright picture to shares of what the network sees, beyond 0 to 1 outside."""
        left, top, right, bottom = self.crop
        return (upright_n4 - [left, top, left, top]) / [right - left, bottom - top, right - left, bottom - top]

    def to_file(self, box: Box) -> Box:
        """Convert a box in input pixels to pixels of the file as stored, before any EXIF rotation."""
        x0, y0, x1, y1 = self._mirrored(self.to_upright(box))
        return (y0, x0, y1, x1) if self.orientation >= 5 else (x0, y0, x1, y1)

    def from_file(self, box: Box) -> Box:
        """Convert a box in pixels of the file as stored to shares of what the network sees."""
        x0, y0, x1, y1 = box
        upright = self._mirrored((y0, x0, y1, x1) if self.orientation >= 5 else box)
        x0, y0, x1, y1 = self.to_shares(np.array([upright]))[0].tolist()
        return x0, y0, x1, y1

    def _mirrored(self, box: Box) -> Box:
        """Mirror an upright box as the file is, before its sides are exchanged; or the other way round."""
        x0, y0, x1, y1 = box
        height, width = self.upright_hw
        if self.orientation in (2, 3, 6, 7):
            x0, x1 = width - x1, width - x0
        if self.orientation in (3, 4, 7, 8):
            y0, y1 = height - y1, height - y0
        return x0, y0, x1, y1


def to_input(image: Image.Image, box: Box | None, size_hw: tuple[int, int]) -> tuple[np.ndarray, View]:
    """Crop the upright RGB picture to `box` and resize it (antialiased bilinear, aspect not kept): (H, W, 3) uint8."""
    crop = (0, 0, *image.size) if box is None else _pixel_box(box, image.size)
    view = View(crop, size_hw, (image.height, image.width), image.info.get("orientation", 1))
    # Cropped first, because resize(box=...) lets pixels from outside the box bleed into its edges.
    cropped = image if box is None else image.crop(crop)
    resized = cropped.resize((size_hw[1], size_hw[0]), Image.Resampling.BILINEAR)
    return np.array(resized), view


def _pixel_box(box: Box, size_wh: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the box in whole pixels, inside the picture and at least one pixel wide and high."""
    width, height = size_wh
    x0, y0 = min(max(round(box[0]), 0), width - 1), min(max(round(box[1]), 0), height - 1)
    x1, y1 = min(max(round(box[2]), x0 + 1), width), min(max(round(box[3]), y0 + 1), height)
    return x0, y0, x1, y1
