"""Every kind of picture file a folder may hold, read from real files; and the way back from input to file."""

import hashlib
import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from likethat.data import decode
from likethat.data.decode import FileFacts, ImageError, read_image, to_input
from likethat.data.reading.pages import digest_data, digest_picture
from likethat.data.reading.values import ValueRange

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# EXIF: where the file's first row and its first column lie on the upright picture.
EXIF_SIDES = {
    1: ("top", "left"),
    2: ("top", "right"),
    3: ("bottom", "right"),
    4: ("bottom", "left"),
    5: ("left", "top"),
    6: ("right", "top"),
    7: ("right", "bottom"),
    8: ("left", "bottom"),
}


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encode(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def turn_upright(file_HW3: np.ndarray, orientation: int) -> np.ndarray:
    """The standard's table, pixel by pixel."""
    first_row, first_column = EXIF_SIDES[orientation]
    rows, columns = file_HW3.shape[:2]
    height, width = (rows, columns) if first_row in ("top", "bottom") else (columns, rows)
    upright = np.zeros((height, width, 3), np.uint8)
    for row in range(rows):
        for column in range(columns):
            place = {"top": row, "bottom": height - 1 - row, "left": row, "right": width - 1 - row}[first_row]
            other = {"top": column, "bottom": height - 1 - column, "left": column, "right": width - 1 - column}[
                first_column
            ]
            y, x = (place, other) if first_row in ("top", "bottom") else (other, place)
            upright[y, x] = file_HW3[row, column]
    return upright


def with_orientation(pixels: np.ndarray, orientation: int, format: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(Image.fromarray(pixels), format, exif=exif, **({"lossless": True} if format == "WEBP" else {}))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_exif_rotation_is_undone_pixel_by_pixel(format, orientation):
    pixels = noise(5, 7)
    image = read_image(with_orientation(pixels, orientation, format))
    assert np.array_equal(np.asarray(image), turn_upright(pixels, orientation))
    assert to_input(image, None, (4, 4))[1].orientation == orientation


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_of_jpeg_matches_the_unrotated_jpeg(orientation):
    pixels = noise(16, 24)
    plain = np.asarray(read_image(encode(Image.fromarray(pixels), "JPEG")))
    image = read_image(with_orientation(pixels, orientation, "JPEG"))
    assert np.array_equal(np.asarray(image), turn_upright(plain, orientation))
    again = read_image(image)  # what is upright stays so, and still knows its file
    assert np.array_equal(np.asarray(again), np.asarray(image))
    assert to_input(again, None, (4, 4))[1].orientation == orientation


@settings(max_examples=60, deadline=None)
@given(data=st.data(), orientation=st.integers(1, 8), format=st.sampled_from(["PNG", "TIFF"]))
def test_a_rectangle_drawn_in_the_file_is_found_again(data, orientation, format):
    height, width = data.draw(st.integers(2, 24)), data.draw(st.integers(2, 24))
    x0, y0 = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    x1, y1 = data.draw(st.integers(x0 + 1, width)), data.draw(st.integers(y0 + 1, height))
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[y0:y1, x0:x1] = 255
    image = read_image(with_orientation(pixels, orientation, format))

    ys, xs = np.nonzero(np.asarray(image)[:, :, 0])
    seen = (int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1)
    left, top = data.draw(st.integers(0, seen[0])), data.draw(st.integers(0, seen[1]))
    right, bottom = data.draw(st.integers(seen[2], image.width)), data.draw(st.integers(seen[3], image.height))
    zoom_y, zoom_x = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    input_HW3, view = to_input(image, (left, top, right, bottom), ((bottom - top) * zoom_y, (right - left) * zoom_x))

    # Zoomed in by a whole number, the brightness along an axis passes half its peak at the rectangle's border.
    # Each axis is looked at alone: at a corner the two axes' weights multiply.
    along_x, along_y = input_HW3[:, :, 0].max(axis=0), input_HW3[:, :, 0].max(axis=1)
    xs, ys = np.nonzero(along_x > along_x.max() / 2)[0], np.nonzero(along_y > along_y.max() / 2)[0]
    box = (int(xs[0]), int(ys[0]), int(xs[-1]) + 1, int(ys[-1]) + 1)
    assert view.to_upright(box) == pytest.approx(seen)
    assert view.to_file(box) == pytest.approx((x0, y0, x1, y1))


@settings(max_examples=60, deadline=None)
@given(box=st.tuples(*[st.floats(-50, 80)] * 4), size_hw=st.tuples(st.integers(1, 20), st.integers(1, 20)))
def test_any_box_is_clamped_then_cropped_then_resized(box, size_hw):
    image = Image.fromarray(noise(17, 31))
    input_HW3, view = to_input(image, box, size_hw)
    left, top, right, bottom = view.crop
    assert 0 <= left < right <= 31
    assert 0 <= top < bottom <= 17
    if 0 <= box[0] <= box[2] - 1 and box[2] <= 31 and 0 <= box[1] <= box[3] - 1 and box[3] <= 17:
        assert all(abs(ours - asked) <= 0.5 for ours, asked in zip(view.crop, box, strict=True))
    alone = Image.fromarray(np.asarray(image)[top:bottom, left:right].copy())  # nothing bleeds in from outside
    expected = alone.resize((size_hw[1], size_hw[0]), Image.Resampling.BILINEAR)
    assert np.array_equal(input_HW3, np.asarray(expected))


def test_shrinking_is_antialiased():
    checks = np.indices((400, 400)).sum(0) % 2 * 255
    input_HW3, _ = to_input(Image.fromarray(checks.astype(np.uint8)).convert("RGB"), None, (10, 10))
    assert np.abs(input_HW3[1:-1, 1:-1].astype(int) - 127).max() <= 2


def test_input_is_writable_and_of_the_asked_size():
    input_HW3, view = to_input(Image.new("RGB", (1, 1), (9, 8, 7)), None, (5, 3))
    assert input_HW3.shape == (5, 3, 3)
    assert input_HW3.dtype == np.uint8
    input_HW3[0, 0] = 0
    assert (input_HW3[1:] == (9, 8, 7)).all()
    assert view.to_file((0, 0, 3, 5)) == (0, 0, 1, 1)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_gives_the_colours_back(format, tmp_path):
    color = (200, 40, 90)
    path = tmp_path / "picture.bin"  # the content decides, not the name
    options = {"lossless": True} if format == "WEBP" else {}
    path.write_bytes(encode(Image.new("RGB", (40, 30), color), format, **options))
    for source in (path, path.read_bytes(), io.BytesIO(path.read_bytes()), Image.open(path)):
        image = read_image(source)
        assert (image.mode, image.size) == ("RGB", (40, 30))
        assert np.abs(np.asarray(image).astype(int) - color).max() <= (2 if format == "JPEG" else 0)


@pytest.mark.parametrize(("format", "kind"), [("AVIF", b"ftypavif"), ("HEIF", b"ftypheic")])
def test_pictures_of_phones_are_read_where_pillow_can(format, kind):
    if format in decode.FORMATS:
        image = read_image(encode(Image.new("RGB", (40, 30), (200, 40, 90)), format, quality=90))
        assert image.size == (40, 30)
        assert np.abs(np.asarray(image).astype(int) - (200, 40, 90)).max() <= 6
    else:
        with pytest.raises(ImageError, match=r"Pillow 11.3|likethat\[heic\]"):
            read_image(b"\0\0\0\x20" + kind + bytes(40))


@pytest.mark.parametrize(
    ("image", "format", "expected"),
    [
        (Image.new("L", (3, 2), 77), "PNG", (77, 77, 77)),
        (Image.new("1", (3, 2), 1), "PNG", (255, 255, 255)),
        (Image.new("1", (3, 2), 0), "TIFF", (0, 0, 0)),
        (Image.new("LA", (3, 2), (0, 51)), "PNG", (204, 204, 204)),
        (Image.new("RGBA", (3, 2), (255, 0, 0, 0)), "PNG", (255, 255, 255)),
        (Image.new("RGBA", (3, 2), (255, 0, 0, 51)), "PNG", (255, 204, 204)),
        (Image.new("RGBA", (3, 2), (10, 20, 30, 255)), "WEBP", (10, 20, 30)),
        (Image.new("RGBA", (3, 2), (10, 20, 30, 255)), "TIFF", (10, 20, 30)),
        (Image.new("CMYK", (3, 2), (255, 0, 255, 0)), "TIFF", (0, 255, 0)),
        (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", (254, 0, 0)),
        (Image.new("F", (3, 2), 0.2), "TIFF", (51, 51, 51)),
        (Image.new("I;16", (3, 2), 51 * 257), "TIFF", (51, 51, 51)),
    ],
)
def test_every_mode_becomes_rgb(image, format, expected):
    options = {"lossless": True} if format == "WEBP" else {}
    result = read_image(encode(image, format, **options))
    assert result.size == image.size
    assert np.abs(np.asarray(result).astype(int) - expected).max() <= (2 if format == "JPEG" else 0)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_16_bits_are_scaled_and_not_clipped(format):
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    result = np.asarray(read_image(encode(Image.fromarray(values), format)))
    nearest = np.array([[(int(value) * 255 * 2 + 65535) // (2 * 65535) for value in row] for row in values])
    assert np.array_equal(result, np.repeat(nearest[:, :, None], 3, axis=2))


def gray(values: list[float], kind: type, value_range: tuple[float, float] | None = None) -> list[int]:
    """Values of a TIFF file of this type, as they are read."""
    data = encode(Image.fromarray(np.array([values], kind)), "TIFF")
    return np.asarray(read_image(data, value_range=value_range))[0, :, 0].tolist()


def test_a_range_that_is_stated_holds_for_every_picture():
    assert gray([0, 1000, 4000, 9000], np.uint16, (0, 4000)) == [0, 64, 255, 255]
    assert gray([-1500, -1000, 0, 1000, 2000], np.int32, (-1000, 1000)) == [0, 0, 128, 255, 255]
    assert gray([-5e5, 0, 5e5], np.float32, (-5e5, 5e5)) == [0, 128, 255]
    # Eight bits are what they are: the range is about pictures that have more.
    assert gray([0, 77, 255], np.uint8, (0, 4000)) == [0, 77, 255]


def test_without_one_nothing_is_guessed():
    assert gray([np.nan, 0.0, 0.2, 1.0, np.inf], np.float32) == [0, 0, 51, 255, 0]
    assert gray([np.nan, np.nan], np.float32) == [0, 0]
    for values, kind, told in (
        ([0, 51.0], np.float32, "float values are read from 0 to 1, and these run from 0 to 51"),
        ([-0.5, 0.5], np.float32, "run from -0.5 to 0.5"),
        ([0, 13107], np.int32, "whole-number values from 0 to 13107 have no agreed range"),
    ):
        with pytest.raises(ImageError, match=told) as caught:
            gray(values, kind)
        assert caught.value.kind == "range"
        assert "--value-range" in str(caught.value)


def test_what_was_found_in_a_file_is_told():
    values = np.array([[3, 4071]], np.uint16)
    facts = read_image(encode(Image.fromarray(values), "PNG")).info["facts"]
    assert facts.values == ValueRange("16-bit", 0, 65535, 3, 4071)
    assert read_image(encode(Image.fromarray(noise(4, 4)), "PNG")).info["facts"] == FileFacts()


def png_16(colour_HW3: np.ndarray) -> bytes:
    """Write a PNG of 16-bit colours, which Pillow cannot."""
    height, width, _ = colour_HW3.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in colour_HW3)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    body = b"".join(struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def test_colours_of_16_bits_are_read_by_their_bits_alone():
    data = png_16(np.full((2, 3, 3), (51 * 257, 0, 65535)))
    image = read_image(data)
    assert np.asarray(image)[0, 0].tolist() == [51, 0, 255]
    assert image.info["facts"].values == ValueRange("16-bit colour", 0, 65535)
    with pytest.raises(ImageError, match="16-bit colour values cannot be read from another range"):
        read_image(data, value_range=(0, 4095))


def stack(format: str, path: Path) -> Path:
    frames = [Image.new("RGB", (6, 6 + number), color) for number, color in enumerate(("red", "blue", "lime"))]
    frames[0].save(path, format, save_all=True, append_images=frames[1:])
    return path


def test_pages_of_a_tiff_are_pictures_of_their_own(tmp_path):
    path = stack("TIFF", tmp_path / "stack.tif")
    colours = {1: (255, 0, 0), 2: (0, 0, 255), 3: (0, 255, 0)}
    for page, colour in colours.items():
        image = read_image(tmp_path / f"stack.tif#page={page}")
        assert image.size == (6, 5 + page)
        assert np.asarray(image)[0, 0].tolist() == list(colour)
        assert image.info["facts"].pages == 3
        assert np.array_equal(np.asarray(read_image(path.read_bytes(), page=page)), np.asarray(image))
    with pytest.raises(ImageError, match="it has 3 pages, so there is no page 4"):
        read_image(tmp_path / "stack.tif#page=4")
    with pytest.raises(ImageError, match="it has 1 pages, so there is no page 2"):
        read_image(encode(Image.new("L", (2, 2)), "PNG"), page=2)
    digests = {digest_picture(tmp_path / f"stack.tif#page={page}") for page in colours}
    assert len(digests) == 3
    assert hashlib.sha256(path.read_bytes()).hexdigest() in digests
    assert digest_data(path.read_bytes(), 2) == digest_picture(tmp_path / "stack.tif#page=2")


def test_a_file_may_really_be_called_like_a_page(tmp_path):
    stack("TIFF", tmp_path / "stack.tif")
    Image.new("RGB", (2, 2), "white").save(tmp_path / "stack.tif#page=2", "PNG")
    assert read_image(tmp_path / "stack.tif#page=2").size == (2, 2)


def test_palettes_and_their_transparency():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putdata([0, 1])
    assert np.asarray(read_image(encode(image, "PNG"))).tolist() == [[[10, 20, 30], [200, 100, 50]]]
    assert np.asarray(read_image(encode(image, "PNG", transparency=1))).tolist() == [[[10, 20, 30], [255] * 3]]
    assert np.asarray(read_image(encode(image, "GIF", transparency=1))).tolist() == [[[10, 20, 30], [255] * 3]]
    partly = encode(image, "PNG", transparency=bytes([51, 255]))
    assert np.asarray(read_image(partly)).tolist() == [[[206, 208, 210], [200, 100, 50]]]
    keyed = encode(Image.new("RGB", (1, 1), (1, 2, 3)), "PNG", transparency=(1, 2, 3))
    assert np.asarray(read_image(keyed)).tolist() == [[[255] * 3]]


@pytest.mark.parametrize("format", ["GIF", "WEBP", "TIFF", "PNG"])
def test_animations_give_their_first_frame(format):
    frames = [Image.new("RGB", (6, 6), color) for color in ("red", "blue", "green")]
    data = encode(frames[0], format, save_all=True, append_images=frames[1:])
    assert np.abs(np.asarray(read_image(data)).astype(int) - (255, 0, 0)).max() <= 4


def test_multi_picture_jpegs_of_phones_are_read():
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    data = encode(frames[0], "MPO", save_all=True, append_images=frames[1:])
    assert np.abs(np.asarray(read_image(data)).astype(int) - (255, 0, 0)).max() <= 4


def test_extreme_sizes():
    assert read_image(encode(Image.new("RGB", (1, 1)), "GIF")).size == (1, 1)
    wide = read_image(encode(Image.new("RGB", (10_000, 40), "red"), "JPEG"))
    input_HW3, view = to_input(wide, None, (224, 224))
    assert view.to_file((0, 0, 224, 224)) == pytest.approx((0, 0, 10_000, 40))
    assert input_HW3.shape == (224, 224, 3)


def png_claiming(width: int, height: int) -> bytes:
    data = bytearray(encode(Image.new("RGB", (1, 1)), "PNG"))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # pytest resets our own filter
@pytest.mark.parametrize("size", [(60_000, 60_000), (20_001, 1), (1, 20_001), (13_345, 13_345)])
def test_bombs_are_refused_by_their_header(size):
    with pytest.raises(ImageError, match=r"bomb\.png: more than 20,000 pixels on a side or 178 million") as caught:
        read_image(png_claiming(*size), name="bomb.png")
    assert caught.value.kind == "bomb"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # pytest resets our own filter
def test_callers_may_take_less():
    with pytest.raises(ImageError, match="or 3 million in all") as caught:
        read_image(png_claiming(2000, 1501), max_pixels=3_000_000)
    assert caught.value.kind == "bomb"
    assert read_image(Image.new("RGB", (20, 15)), max_pixels=300).size == (20, 15)


def test_the_largest_allowed_pictures_are_no_bombs():
    assert read_image(encode(Image.new("1", (20_000, 2)), "PNG")).size == (20_000, 2)
    with pytest.raises(ImageError) as caught:
        read_image(png_claiming(13_341, 13_341))  # 177.98 million; the pixels themselves are missing
    assert caught.value.kind != "bomb"


@pytest.mark.parametrize("format", FORMATS)
def test_truncated_files_are_named(format, tmp_path):
    whole = encode(Image.fromarray(noise(60, 80)), format)
    path = tmp_path / "half"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ImageError, match="half: the file ends too early") as caught:
        read_image(path)
    assert caught.value.kind == "truncated"


def test_unusable_files_are_named_with_the_cause(tmp_path):
    cases = {
        "zero.jpg": (b"", "empty", "empty"),
        "page.jpg": (b"\n<!DOCTYPE html><html><body>404</body></html>", "unreadable", "web page"),
        "notes.png": (b"these are notes", "unreadable", "none of these"),
        "drawing.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unreadable", "none of these"),
    }
    for name, (content, kind, cause) in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ImageError, match=cause) as caught:
            read_image(path)
        assert caught.value.kind == kind
        assert str(path) in str(caught.value)
    with pytest.raises(ImageError, match="No such file"):
        read_image(tmp_path / "missing.jpg")


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_broken_exif_does_not_hide_the_picture():
    data = encode(Image.fromarray(noise(8, 8)), "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff garbage")
    assert np.array_equal(np.asarray(read_image(data)), noise(8, 8))


def test_the_callers_image_is_left_alone():
    exif = Image.Exif()
    exif[0x0112] = 6
    for data in (encode(Image.new("RGB", (3, 2)), "PNG", exif=exif), encode(Image.new("RGB", (3, 2)), "PNG")):
        image = Image.open(io.BytesIO(data))
        before = dict(image.info)
        read_image(image)
        assert image.size == (3, 2)
        assert image.info == before


def test_no_file_stays_open(tmp_path):
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("open files are counted in /proc")
    for index, format in enumerate(FORMATS):
        (tmp_path / f"good{index}").write_bytes(encode(Image.fromarray(noise(20, 20)), format))
        (tmp_path / f"cut{index}").write_bytes(encode(Image.fromarray(noise(20, 20)), format)[:200])
    kept = []
    for path in tmp_path.iterdir():
        try:
            kept.append(read_image(path))
        except ImageError as error:
            kept.append(error)

    def opened() -> list[str]:
        """Of these files: what other tests left may be closed meanwhile."""
        names = [os.path.realpath(descriptor) for descriptor in descriptors.iterdir()]
        return [name for name in names if name.startswith(str(tmp_path.resolve()))]

    assert opened() == []
    with (tmp_path / "good0").open():
        assert len(opened()) == 1


FUZZED = [encode(Image.fromarray(noise(12, 12)), format) for format in FORMATS]
FUZZED += [encode(Image.fromarray(noise(12, 12)), "TIFF", compression="tiff_lzw")]


@pytest.mark.filterwarnings("ignore")  # Pillow grumbles about broken metadata
@settings(max_examples=400, deadline=None)
@given(
    whole=st.sampled_from(FUZZED),
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=8),
    keep=st.floats(0.02, 1),
)
def test_damaged_bytes_give_a_picture_or_an_image_error(whole, edits, keep):
    data = bytearray(whole)
    for where, value in edits:
        data[where % min(len(data), 200)] = value
    try:
        image = read_image(bytes(data[: max(1, int(keep * len(data)))]))
    except ImageError:
        return
    assert image.mode == "RGB"
