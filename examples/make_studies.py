"""Draw a radiologist's data, in place of real one: DICOM slices of a few patients each, and a table that lists them.

    python examples/make_studies.py studies

It needs `pip install 'likethat[dicom]'`.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

PATIENTS, SIDE = 40, 128
SECONDARY_CAPTURE = "1.2.840.10008.5.1.4.1.1.7"


def draw_slice(rng: np.random.Generator, malignant: bool) -> np.ndarray:
    """Return Hounsfield units: a chest, two lungs of air, and a nodule in one of them; malignant ones have spikes."""
    y, x = (np.mgrid[:SIDE, :SIDE] - SIDE / 2) / (SIDE / 2)
    units = np.where((x / 0.95) ** 2 + (y / 0.8) ** 2 < 1, 40.0, -1000.0)
    for side in (-1, 1):
        units[((x - side * 0.42) / 0.36) ** 2 + (y / 0.62) ** 2 < 1] = -850
    cx, cy = rng.choice([-1, 1]) * rng.uniform(0.32, 0.52), rng.uniform(-0.3, 0.3)
    angle, distance = np.arctan2(y - cy, x - cx), np.hypot(x - cx, y - cy)
    spikes = 1.2 * np.abs(np.sin(4 * angle + rng.uniform(0, 6))) ** 3 if malignant else 0.0
    units[distance < rng.uniform(0.13, 0.16) * (1 + spikes)] = 60
    return units + rng.normal(0, 25, units.shape)


def write_dicom(path: Path, units_HW: np.ndarray, patient: str) -> None:
    """Write 12 bits with the rescaling and the lung window that a scanner would give."""
    file, meta = Dataset(), FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = SECONDARY_CAPTURE, generate_uid()
    file.file_meta = meta
    file.PatientName, file.PatientID = f"Doe^{patient}", patient
    file.Rows, file.Columns = units_HW.shape
    file.SamplesPerPixel, file.PhotometricInterpretation, file.PixelRepresentation = 1, "MONOCHROME2", 0
    file.BitsAllocated, file.BitsStored, file.HighBit = 16, 12, 11
    file.RescaleIntercept, file.RescaleSlope = -1024, 1
    file.WindowCenter, file.WindowWidth = -500, 1500
    file.PixelData = (units_HW + 1024).clip(0, 4095).astype(np.uint16).tobytes()
    file.save_as(path, enforce_file_format=True)


def main(folder: Path) -> None:
    """Write three slices of every patient, and studies.csv."""
    (folder / "slices").mkdir(parents=True)
    rng, rows = np.random.default_rng(0), []
    for number in range(PATIENTS):
        patient, finding = f"P{number:03}", ("benign", "malignant")[number % 3 == 0]
        for slice_number in range(3):
            name = f"slices/{number:03}-{slice_number}.dcm"
            write_dicom(folder / name, draw_slice(rng, finding == "malignant"), patient)
            rows.append((name, finding, patient))
    with (folder / "studies.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "finding", "patient"), *rows])
    print(f"{folder / 'studies.csv'}: {len(rows)} slices of {PATIENTS} patients")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
