"""From a picture file to the network's input, and from the input's pixels back to the file's."""

import contextlib
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

from likethat.data.reading.dicom import BadDicom, DicomPicture, is_dicom
from likethat.data.reading.pages import read_page
from likethat.data.reading.values import Range, UnknownRange, ValueRange, of_bits, to_8_bits
from likethat.errors import UserError

with contextlib.suppress(ImportError):  # Pillow before 11.3
    from PIL import AvifImagePlugin  # noqa: F401
with contextlib.suppress(ImportError):  # the extra `heic`
    import pillow_heif

    pillow_heif.register_heif_opener()

FORMATS = tuple(name for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF") if name in Image.OPEN)
READABLE = "JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, HEIC or DICOM"
COLOUR = "16-bit colour"
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
    """A picture that cannot be used. `kind` is one of unreadable, truncated, empty, bomb, range."""

    def __init__(self, name: str, kind: str, cause: str) -> None:
        super().__init__(name, kind, cause)
        self.name, self.kind, self.cause = name, kind, cause

    def __str__(self) -> str:
        return f"{self.name}: {self.cause}"


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a file holds besides the picture that was read of it."""

    pages: int = 1
    values: ValueRange | None = None  # of a picture of more than 8 bits


def read_image(
    source: Path | bytes | BinaryIO | Image.Image,
    *,
    name: str | None = None,
    value_range: Range | None = None,
    page: int = 1,
    max_pixels: int = MAX_PIXELS,
) -> Image.Image:
    """Read the picture, upright and in RGB; `name` is what an error calls it. A path may end in `#page=2`.

    Transparent parts are laid on white, animations give their first frame. `value_range` says which values of pictures
    of more than 8 bits become black and white; without it the kind of the file does, see `_usual_range`. The result's
    info keeps the EXIF orientation that the file had, so that `to_input` can map back to the file's pixels, and the
    file's `facts`.
    """
    name = name or _name_of(source)
    data = b""
    try:
        if isinstance(source, Image.Image):
            image = source
        else:
            data, page = _read_bytes(source, name, page)
            if is_dicom(data):
                return _read_dicom(data, page, name, value_range, max_pixels)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        pages = getattr(image, "n_frames", 1) if image.format == "TIFF" or page > 1 else 1
        if page > pages:
            raise ImageError(name, "unreadable", f"it has {pages} pages, so there is no page {page}")
        if page > 1:
            image.seek(page - 1)
        _check_size(image.size, name, max_pixels)
        rgb, orientation, values = _upright_rgb(image, value_range)
    except ImageError:
        raise
    except UnknownRange as error:
        raise _no_range(name, error) from error
    except Image.DecompressionBombError as error:
        raise _too_large(name, max_pixels) from error
    except Exception as error:  # Pillow's decoders raise nearly everything on broken data
        raise _broken(name, data, error) from error
    if rgb is source:  # the caller's own image keeps its info
        rgb = rgb.copy()
    facts = image.info.get("facts") or FileFacts(pages, values)
    rgb.info = {"orientation": orientation, "facts": facts}
    return rgb


def _read_dicom(data: bytes, page: int, name: str, value_range: Range | None, max_pixels: int) -> Image.Image:
    try:
        picture = DicomPicture(data, page)
        _check_size(picture.size, name, max_pixels)
        pixels, values = picture.to_8_bits(value_range)
    except BadDicom as error:
        raise ImageError(name, "unreadable", str(error)) from None
    except UnknownRange as error:
        raise _no_range(name, error) from None
    image = Image.fromarray(pixels).convert("RGB")
    image.info = {"orientation": 1, "facts": FileFacts(picture.pages, values)}
    return image


def _name_of(source: Path | bytes | BinaryIO | Image.Image) -> str:
    if isinstance(source, Path):
        return str(source)
    return str(getattr(source, "filename", "") or getattr(source, "name", "") or "the image")


def _read_bytes(source: Path | bytes | BinaryIO, name: str, page: int) -> tuple[bytes, int]:
    if isinstance(source, Path):
        try:
            data, page = read_page(source)
        except OSError as error:
            raise ImageError(name, "unreadable", f"cannot be opened ({error.strerror or error})") from error
    else:
        data = source if isinstance(source, bytes) else source.read()
    if not data:
        raise ImageError(name, "empty", "the file is empty (0 bytes); copy it again or delete it")
    return data, page


def _check_size(size_wh: tuple[int, int], name: str, max_pixels: int) -> None:
    if max(size_wh) > MAX_SIDE or size_wh[0] * size_wh[1] > max_pixels:
        raise _too_large(name, max_pixels)


def _too_large(name: str, max_pixels: int) -> ImageError:
    limits = f"more than {MAX_SIDE:,} pixels on a side or {max_pixels // 1_000_000} million in all"
    return ImageError(name, "bomb", f"{limits}; scale it down or delete it")


def _no_range(name: str, error: UnknownRange) -> ImageError:
    return ImageError(name, "range", f"its {error}; train with their range, as --value-range 0,4095, or convert it")


def _broken(name: str, data: bytes, error: Exception) -> ImageError:
    riff_is_short = data[:4] == b"RIFF" and len(data) < int.from_bytes(data[4:8], "little") + 8
    if "truncated" in str(error).lower() or riff_is_short:
        return ImageError(name, "truncated", "the file ends too early; copy it again or delete it")
    if data[:512].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        why = "it is a web page"
    elif isinstance(error, UnidentifiedImageError):
        why = _unsupported(data) or "its content is none of these"
    else:
        why = str(error) or type(error).__name__
    readable = f"not a readable {READABLE} picture"
    return ImageError(name, "unreadable", f"{readable} ({why}); convert it or delete it")


def _unsupported(data: bytes) -> str:
    """Name the package that reads a picture of a kind that this installation cannot read."""
    brand = data[8:12] if data[4:8] == b"ftyp" else b""
    if brand in (b"avif", b"avis") and "AVIF" not in FORMATS:
        return "it is an AVIF picture, which needs Pillow 11.3 or later"
    if brand in (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1") and "HEIF" not in FORMATS:
        return "it is a HEIC picture, which needs another package: `pip install 'likethat[heic]'`"
    return ""


def _upright_rgb(image: Image.Image, value_range: Range | None) -> tuple[Image.Image, int, ValueRange | None]:
    """Return the picture, the EXIF orientation its file had, and how values beyond 8 bits were read."""
    orientation = image.info.get("orientation", 1)
    if image.format == "TIFF":  # Pillow turns TIFF upright while it loads, and forgets how it was
        orientation = _exif_orientation(image)
    kind, usual = _usual_range(image)  # before it is loaded: Pillow then forgets how values were stored
    if kind == COLOUR and value_range is not None:
        raise UnknownRange(f"{COLOUR} values cannot be read from another range than 0 to 65535")
    image.load()
    turn = _exif_orientation(image)
    values = ValueRange(COLOUR, *of_bits(16)) if kind == COLOUR else None
    if image.mode.startswith("I") or image.mode == "F":
        pixel_HW, values = to_8_bits(np.asarray(image), kind, usual, value_range)
        image = Image.fromarray(pixel_HW)
    rgb = _to_rgb(image)
    if turn == 1:
        return rgb, orientation, values
    return rgb.transpose(_TURN_UPRIGHT[turn]), turn, values


def _usual_range(image: Image.Image) -> tuple[str, Range | None]:
    """Return the kind of a picture's values and their usual range: all that its bits can hold, and 0 to 1 of floats.

    Signed and 32-bit numbers have no usual range: nobody fills all of it.
    """
    if image.mode == "F":
        return "float", (0.0, 1.0)
    tiles = getattr(image, "tile", None)
    stored = tiles[0][3] if tiles else ""  # how Pillow calls what it is about to read
    raw = str(stored[0] if isinstance(stored, tuple) and stored else stored)
    if image.mode == "I" and raw != "I;16B":  # how earlier versions of Pillow read PNG files of 16 bits
        return "whole-number", None
    if image.mode.startswith("I"):
        bits = 12 if raw == "I;12" else 16
        return f"{bits}-bit", of_bits(bits)
    return (COLOUR, None) if ";16" in raw else ("", None)  # of colours Pillow reads the higher 8 bits


def _exif_orientation(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # broken EXIF: the pixels are good, and viewers show them as they lie
        return 1
    return int(orientation) if orientation in range(1, 9) else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


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
    view = view_of(image, box, size_hw)
    # Cropped first, because resize(box=...) lets pixels from outside the box bleed into its edges.
    cropped = image if box is None else image.crop(view.crop)
    resized = cropped.resize((size_hw[1], size_hw[0]), Image.Resampling.BILINEAR)
    return np.array(resized), view


def view_of(image: Image.Image, box: Box | None, size_hw: tuple[int, int]) -> View:
    """Return the way from an upright picture to the input that `to_input` makes of it."""
    crop = (0, 0, *image.size) if box is None else _pixel_box(box, image.size)
    return View(crop, size_hw, (image.height, image.width), image.info.get("orientation", 1))


def _pixel_box(box: Box, size_wh: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the box in whole pixels, inside the picture and at least one pixel wide and high."""
    width, height = size_wh
    x0, y0 = min(max(round(box[0]), 0), width - 1), min(max(round(box[1]), 0), height - 1)
    x1, y1 = min(max(round(box[2]), x0 + 1), width), min(max(round(box[3]), y0 + 1), height)
    return x0, y0, x1, y1
