"""DICOM files, written by pydicom, of a patient whose name must not be seen anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

PATIENT = "Secret^Patient"


def write_dicom(path: Path, values: np.ndarray, syntax: str = "1.2.840.10008.1.2.1", **tags: Any) -> Path:
    """Write values (H, W) or (frames, H, W), or colours (H, W, 3), with tags over those that describe them."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.encaps import encapsulate
    from pydicom.uid import UID, generate_uid

    meta = FileMetaDataset()
    meta.TransferSyntaxUID = UID(syntax)
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = "1.2.840.10008.5.1.4.1.1.7", generate_uid()
    file = Dataset()
    file.file_meta = meta
    file.PatientName, file.PatientID, file.PatientBirthDate = PATIENT, "Secret-ID", "19700101"
    is_colour = tags.get("SamplesPerPixel") == 3
    bits = 8 * values.dtype.itemsize
    described = {
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
        "Rows": values.shape[0 if is_colour else -2],
        "Columns": values.shape[1 if is_colour else -1],
        "BitsAllocated": bits,
        "BitsStored": bits,
        "HighBit": tags.get("BitsStored", bits) - 1,
        "PixelRepresentation": 0,
    }
    for name, value in (described | tags).items():
        setattr(file, name, value)
    file.PixelData = encapsulate([values.tobytes()]) if meta.TransferSyntaxUID.is_encapsulated else values.tobytes()
    file.save_as(path, enforce_file_format=True)
    return path
