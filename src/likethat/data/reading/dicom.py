"""DICOM pictures, by pydicom. Only what describes pixels is read: no name, no date, nothing else of a patient."""

from __future__ import annotations

import io
import logging
import warnings
from functools import cache
from typing import Any

import numpy as np

from likethat.data.reading.values import Range, UnknownRange, ValueRange, of_bits, to_8_bits

DEFLATED = b"1.2.840.10008.1.2.1.99"  # a transfer syntax whose size is not known before it is unpacked
TAGS = """SamplesPerPixel PhotometricInterpretation Rows Columns BitsAllocated BitsStored HighBit PixelRepresentation
PlanarConfiguration NumberOfFrames PixelData FloatPixelData DoubleFloatPixelData ExtendedOffsetTable
ExtendedOffsetTableLengths RescaleSlope RescaleIntercept ModalityLUTSequence WindowCenter WindowWidth VOILUTFunction
VOILUTSequence RedPaletteColorLookupTableDescriptor GreenPaletteColorLookupTableDescriptor
BluePaletteColorLookupTableDescriptor RedPaletteColorLookupTableData GreenPaletteColorLookupTableData
BluePaletteColorLookupTableData SharedFunctionalGroupsSequence PerFrameFunctionalGroupsSequence""".split()
OF_FRAMES = ("PixelValueTransformationSequence", "FrameVOILUTSequence")  # where files of many frames have their ranges


class BadDicom(Exception):
    """A DICOM file that gives no picture; the text says why and holds nothing of the file's own words."""


def is_dicom(data: bytes) -> bool:
    return data[128:132] == b"DICM"


class DicomPicture:
    """One frame of a DICOM file, opened; pixels are decoded only when asked for."""

    def __init__(self, data: bytes, page: int) -> None:
        pydicom = _import_pydicom()
        if DEFLATED in data[:4096]:
            raise BadDicom("it is a deflated DICOM file; save it in another transfer syntax")
        try:
            self.file = pydicom.dcmread(io.BytesIO(data), specific_tags=TAGS)
            self.pages = int(self.file.get("NumberOfFrames") or 1)
            self.size = int(self.file.Columns), int(self.file.Rows)
            colours, bits = int(self.file.SamplesPerPixel), int(self.file.BitsAllocated)
        except Exception:  # its text may quote the file
            raise BadDicom("it is no DICOM picture, or a damaged one; export it again or delete it") from None
        if colours not in (1, 3) or bits not in (1, 8, 16, 32):
            raise BadDicom(f"it has {colours} values of {bits} bits a pixel; save it with 1 or 3 of 8, 16 or 32 bits")
        if page > self.pages:
            raise BadDicom(f"it has {self.pages} frames, so there is no page {page}")
        self.page = page

    def to_8_bits(self, stated: Range | None) -> tuple[np.ndarray, ValueRange | None]:
        """Return (H, W) or (H, W, 3) bytes, and how values beyond 8 bits were read."""
        try:
            return self._to_8_bits(stated)
        except (UnknownRange, BadDicom):
            raise
        except Exception:
            name = getattr(getattr(self.file.file_meta, "TransferSyntaxUID", None), "name", "unknown")
            raise BadDicom(
                f"pydicom cannot decode its pixels ({name}); compressed ones may need `pip install pylibjpeg "
                "pylibjpeg-libjpeg pylibjpeg-openjpeg`, damaged ones another export"
            ) from None

    def _to_8_bits(self, stated: Range | None) -> tuple[np.ndarray, ValueRange | None]:
        from pydicom.pixels import apply_color_lut, apply_modality_lut, apply_voi, pixel_array

        stored = pixel_array(self.file, index=self.page - 1)
        kind = str(self.file.PhotometricInterpretation)
        if kind == "PALETTE COLOR":
            stored = apply_color_lut(stored, self.file)
        if stored.ndim == 3:
            bits = 8 * stored.dtype.itemsize if kind == "PALETTE COLOR" else int(self.file.BitsStored)
            black, white = of_bits(bits)
            return np.round(stored * (255 / white)).astype(np.uint8), (
                None if bits == 8 else ValueRange("DICOM colour", black, white)
            )
        ranges = self._ranges()
        values_HW = apply_modality_lut(stored, ranges)
        # A window, or a table in its place, says which values are to be seen; without either, all that can be.
        if stated is None and "WindowCenter" not in ranges and ranges.get("VOILUTSequence"):
            bits = int(ranges.VOILUTSequence[0].LUTDescriptor[2])
            values_HW = apply_voi(values_HW.astype(np.int64), ranges)
            usual: Range | None = of_bits(bits)
        else:
            usual = self._window(ranges) or self._all_values(ranges)
            if usual is not None and stated is None:
                values_HW = _sigmoid(values_HW, usual) if ranges.get("VOILUTFunction") == "SIGMOID" else values_HW
        # What lies outside a window is black or white by intention: it is stated, by the file.
        pixel_HW, found = to_8_bits(values_HW, "DICOM", None, stated or usual)
        return 255 - pixel_HW if kind == "MONOCHROME1" else pixel_HW, found

    def _ranges(self) -> Any:
        """Return the file's own description of its values, with that of the frame where it has many."""
        from pydicom.dataset import Dataset

        found = Dataset()
        found.update({element.tag: element for element in self.file if element.VR != "SQ" or "LUT" in element.keyword})
        groups = [*(self.file.get("SharedFunctionalGroupsSequence") or [])]
        groups += (self.file.get("PerFrameFunctionalGroupsSequence") or [])[self.page - 1 : self.page]
        for group in groups:
            for name in OF_FRAMES:
                for item in group.get(name) or []:
                    found.update({element.tag: element for element in item})
        return found

    def _window(self, ranges: Any) -> Range | None:
        if ranges.get("WindowCenter") is None or ranges.get("WindowWidth") is None:
            return None
        centre, width = (float(np.atleast_1d(ranges[name].value)[0]) for name in ("WindowCenter", "WindowWidth"))
        if ranges.get("VOILUTFunction", "LINEAR") == "LINEAR":  # PS3.3 C.11.2.1.2.1
            centre, width = centre - 0.5, width - 1
        width = max(width, 1e-6)
        return centre - width / 2, centre + width / 2

    def _all_values(self, ranges: Any) -> Range | None:
        """Return the range of all values that the stored bits can hold."""
        if "PixelData" not in self.file or ranges.get("ModalityLUTSequence"):
            return None
        bits, signed = int(self.file.BitsStored), int(self.file.PixelRepresentation) == 1
        ends = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if signed else of_bits(bits)
        slope, intercept = (
            float(ranges.get(name, usual)) for name, usual in (("RescaleSlope", 1), ("RescaleIntercept", 0))
        )
        low, high = sorted(slope * end + intercept for end in ends)
        return low, high


def _sigmoid(values_HW: np.ndarray, window: Range) -> np.ndarray:
    low, high = window
    share_HW = 1 / (1 + np.exp(-4 * (values_HW - (low + high) / 2) / (high - low)))  # PS3.3 C.11.2.1.3.1
    return low + (high - low) * share_HW


@cache
def _import_pydicom() -> Any:
    try:
        import pydicom
    except ImportError as error:
        raise BadDicom("it is a DICOM picture, which needs another package; `pip install 'likethat[dicom]'`") from error
    # Complaints about odd values quote them, a patient's name among them.
    warnings.filterwarnings("ignore", module="pydicom")
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)
    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
    return pydicom
