"""DICOM files as pydicom writes them: windows, rescaling, inverted and coloured pictures, frames, and no word of whom
they show."""

from __future__ import annotations

from fractions import Fraction
from math import floor
from pathlib import Path

import numpy as np
import pytest
from helpers.dicom import PATIENT, write_dicom
from pydicom.dataset import Dataset

from likethat.data.decode import ImageError, read_image
from likethat.data.reading.values import ValueRange

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)


def gray(path: Path, **options: object) -> np.ndarray:
    pixel_HW3 = np.asarray(read_image(path, **options))  # type: ignore[arg-type]
    assert (pixel_HW3 == pixel_HW3[:, :, :1]).all()
    return pixel_HW3[:, :, 0]


def between(values_HW: np.ndarray, black: float, white: float) -> np.ndarray:
    """Slow and obvious: every value by itself, in exact fractions."""
    span = Fraction(white) - Fraction(black)
    shares = [[min(max((Fraction(float(value)) - Fraction(black)) / span, 0), 1) for value in row] for row in values_HW]
    return np.array([[floor(255 * share + Fraction(1, 2)) for share in row] for row in shares], np.uint8)


def test_without_a_window_all_stored_bits_count(tmp_path):
    path = write_dicom(tmp_path / "a.dcm", RAMP, BitsStored=12)
    assert np.array_equal(gray(path), between(RAMP, 0, 4095))
    assert read_image(path).info["facts"].values == ValueRange("DICOM", 0, 4095, 0, 4095)


def test_the_files_window_is_applied_after_rescaling(tmp_path):
    tags = {"RescaleSlope": 2, "RescaleIntercept": -1024, "WindowCenter": 40, "WindowWidth": 400}
    path = write_dicom(tmp_path / "a.dcm", RAMP, **tags)
    rescaled = RAMP * 2.0 - 1024
    assert np.array_equal(gray(path), between(rescaled, 40 - 0.5 - 399 / 2, 40 - 0.5 + 399 / 2))
    exact = write_dicom(tmp_path / "b.dcm", RAMP, VOILUTFunction="LINEAR_EXACT", **tags)
    assert np.array_equal(gray(exact), between(rescaled, -160, 240))
    several = write_dicom(tmp_path / "c.dcm", RAMP, **tags | {"WindowCenter": [40, 900], "WindowWidth": [400, 20]})
    assert np.array_equal(gray(several), gray(path))
    soft = gray(write_dicom(tmp_path / "d.dcm", RAMP, VOILUTFunction="SIGMOID", **tags)).ravel()
    share = 1 / (1 + np.exp(-4 * (rescaled.ravel() - 40) / 400))
    assert np.abs(soft - 255 * share).max() <= 0.51


def test_a_stated_range_comes_before_the_files_window(tmp_path):
    path = write_dicom(
        tmp_path / "a.dcm", RAMP, RescaleIntercept=-1024, RescaleSlope=1, WindowCenter=40, WindowWidth=400
    )
    assert np.array_equal(gray(path, value_range=(-1000, 400)), between(RAMP - 1024.0, -1000, 400))


def test_monochrome1_is_white_where_values_are_low(tmp_path):
    path = write_dicom(tmp_path / "a.dcm", RAMP, PhotometricInterpretation="MONOCHROME1", BitsStored=12)
    assert np.array_equal(gray(path), 255 - between(RAMP, 0, 4095))


def test_signed_values(tmp_path):
    values = np.array([[-2048, 0, 2047]], np.int16)
    path = write_dicom(tmp_path / "a.dcm", values, PixelRepresentation=1, BitsStored=12)
    assert gray(path).tolist() == between(values, -2048, 2047).tolist()


def test_a_table_of_values_in_place_of_a_window(tmp_path):
    lut = Dataset()
    lut.add_new("LUTDescriptor", "US", [4, 0, 8])
    lut.add_new("LUTData", "US", [0, 200, 100, 255])
    values = np.array([[0, 1, 2, 3, 9]], np.uint16)
    path = write_dicom(tmp_path / "a.dcm", values, VOILUTSequence=[lut])
    assert gray(path).tolist() == [[0, 200, 100, 255, 255]]


def test_colours(tmp_path):
    pixel_HW3 = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    colour = {"PhotometricInterpretation": "RGB", "SamplesPerPixel": 3, "PlanarConfiguration": 0}
    path = write_dicom(tmp_path / "a.dcm", pixel_HW3, **colour)
    image = read_image(path)
    assert np.array_equal(np.asarray(image), pixel_HW3)
    assert image.info["facts"].values is None
    planes = pixel_HW3.transpose(2, 0, 1).copy()
    path = write_dicom(tmp_path / "b.dcm", planes, **colour | {"PlanarConfiguration": 1, "Rows": 5, "Columns": 7})
    assert np.array_equal(np.asarray(read_image(path)), pixel_HW3)


def test_frames_are_pages_with_windows_of_their_own(tmp_path):
    frames = np.stack([RAMP, RAMP // 2])
    groups = []
    for centre in (1000, 3000):
        window, group = Dataset(), Dataset()
        window.WindowCenter, window.WindowWidth = centre, 1001
        group.FrameVOILUTSequence = [window]
        groups.append(group)
    path = write_dicom(tmp_path / "a.dcm", frames, NumberOfFrames=2, PerFrameFunctionalGroupsSequence=groups)
    assert np.array_equal(gray(path), between(RAMP, 499.5, 1499.5))
    assert np.array_equal(gray(tmp_path / "a.dcm#page=2"), between(RAMP // 2, 2499.5, 3499.5))
    assert read_image(path).info["facts"].pages == 2
    with pytest.raises(ImageError, match="it has 2 frames, so there is no page 3"):
        read_image(tmp_path / "a.dcm#page=3")


def test_nothing_of_the_patient_is_told(tmp_path, recwarn, capsys):
    good = write_dicom(tmp_path / "a.dcm", RAMP)
    image = read_image(good)
    assert PATIENT not in repr(vars(image))
    data, errors = bytearray(good.read_bytes()), []
    assert PATIENT.encode() in data
    for number in range(132, len(data), 13):  # damaged anywhere: in the patient's name, in lengths, in pixels
        broken = bytearray(data)
        broken[number] ^= 0xFF
        try:
            read_image(bytes(broken[: len(data) - number % 50]), name="x.dcm")
        except ImageError as error:
            errors.append(error)
    assert errors
    assert not [error for error in errors if "Secret" in str(error) or error.__cause__ is not None]
    assert not [warning for warning in recwarn if "Secret" in str(warning.message)]
    assert "Secret" not in "".join(capsys.readouterr())


def test_bombs_and_what_cannot_be_decoded(tmp_path):
    path = write_dicom(tmp_path / "a.dcm", RAMP, Rows=60_000, Columns=60_000)
    with pytest.raises(ImageError, match="more than 20,000 pixels") as caught:
        read_image(path)
    assert caught.value.kind == "bomb"
    path = write_dicom(tmp_path / "b.dcm", RAMP, syntax="1.2.840.10008.1.2.4.70")
    with pytest.raises(ImageError, match=r"cannot decode its pixels \(JPEG Lossless.*pylibjpeg"):
        read_image(path)
    path = write_dicom(tmp_path / "c.dcm", RAMP, syntax="1.2.840.10008.1.2.1.99")
    with pytest.raises(ImageError, match="deflated"):
        read_image(path)
    (tmp_path / "d.dcm").write_bytes(bytes(128) + b"DICM")
    with pytest.raises(ImageError, match="no DICOM picture"):
        read_image(tmp_path / "d.dcm")
