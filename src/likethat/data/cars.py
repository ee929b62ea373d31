"""Stanford Cars in both published layouts: cars_train, cars_test and devkit; or car_ims and cars_annos.mat."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from likethat.data.dataset import DataSet, Sample, hold_out
from likethat.errors import UserError

TEST_LABELS = "cars_test_annos_withlabels.mat"


def find_cars(path: Path) -> Path | None:
    """Return the folder with the Cars annotations: `path` itself or stanford_cars in it."""
    for root in (path, path / "stanford_cars"):
        if (root / "devkit" / "cars_train_annos.mat").is_file() or (root / "cars_annos.mat").is_file():
            return root
    return None


def open_cars(root: Path, *, seed: int, full_images: bool, val_fraction: float) -> DataSet:
    """Open the published split, with validation images held out of its training images, cropped to the cars' boxes."""
    read = _read_single_table if (root / "cars_annos.mat").is_file() else _read_devkit
    try:
        classes, train, test = read(root)
    except (KeyError, ValueError) as error:
        raise UserError(f"{root}: the annotations lack a field ({error}): download them again") from error
    for sample in train + test:
        if not 0 <= sample.label < len(classes):
            raise UserError(
                f"{root}: {sample.path} has class {sample.label + 1} of {len(classes)}: download the annotations again"
            )
    if full_images:
        train, test = ([replace(sample, box=None, object_box=sample.box) for sample in part] for part in (train, test))
    kept, val = hold_out(train, classes, [val_fraction], seed=seed)
    return DataSet(root, "cars", classes, kept, val, tuple(test), held_out=("val",))


def _read_devkit(root: Path) -> tuple[tuple[str, ...], list[Sample], list[Sample]]:
    devkit = root / "devkit"
    test_file = next((folder / TEST_LABELS for folder in (devkit, root) if (folder / TEST_LABELS).is_file()), None)
    if test_file is None:
        raise UserError(
            f"{root} has no {TEST_LABELS}, and without it the test images have no classes: "
            f"download it and put it into {devkit}"
        )
    classes = _names(_load(devkit / "cars_meta.mat")["class_names"])
    parts = []
    for file, folder in ((devkit / "cars_train_annos.mat", "cars_train"), (test_file, "cars_test")):
        annotations = np.atleast_1d(_load(file)["annotations"])
        parts.append(_samples(annotations, (f"{folder}/{name}" for name in _names(annotations["fname"]))))
    train, test = parts
    return classes, train, test


def _read_single_table(root: Path) -> tuple[tuple[str, ...], list[Sample], list[Sample]]:
    table = _load(root / "cars_annos.mat")
    annotations = np.atleast_1d(table["annotations"])
    samples = _samples(annotations, _names(annotations["relative_im_path"]))
    is_test = [bool(flag) for flag in annotations["test"]]
    train = [sample for sample, testing in zip(samples, is_test, strict=True) if not testing]
    test = [sample for sample, testing in zip(samples, is_test, strict=True) if testing]
    return _names(table["class_names"]), train, test


def _samples(annotations: np.ndarray, paths: Iterable[str]) -> list[Sample]:
    # Matlab counts from 1 and includes the last pixel; classes count from 1 too.
    columns = (annotations[name] for name in ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class"))
    return [
        Sample(path, int(label) - 1, (float(x1) - 1, float(y1) - 1, float(x2), float(y2)))
        for path, x1, y1, x2, y2, label in zip(paths, *columns, strict=True)
    ]


def _names(values: Any) -> tuple[str, ...]:
    return tuple(str(value) for value in np.atleast_1d(values))


def _load(file: Path) -> dict[str, Any]:
    # Only a user of Cars waits for scipy.
    from scipy.io import loadmat

    try:
        table: dict[str, Any] = loadmat(file, squeeze_me=True)
    except Exception as error:  # scipy raises nearly everything on broken files
        raise UserError(f"{file} cannot be read as a Matlab file ({error}): download it again") from error
    return table
