"""Stanford Cars from real .mat files, in both published layouts."""

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from likethat.data.dataset import Sample
from likethat.data.formats import open_dataset
from likethat.errors import UserError

CLASS_NAMES = ["AM General Hummer SUV 2000", "Acura RL Sedan 2012", "smart fortwo Convertible 2012"]
BOX_FIELDS = ["bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2"]


def struct_array(fields: list[str], rows: list[tuple[object, ...]]) -> np.ndarray:
    """A 1 x N Matlab struct array."""
    array = np.zeros((1, len(rows)), dtype=[(field, object) for field in fields])
    for index, row in enumerate(rows):
        array[0, index] = row
    return array


def cell_array(names: list[str]) -> np.ndarray:
    return np.array([names], dtype=object)


def box_of(index: int) -> tuple[int, int, int, int]:
    return index + 1, index + 2, index + 11, index + 22


def write_devkit(root: Path, labels_in: str) -> Path:
    (root / "devkit").mkdir(parents=True)
    for part in ("train", "test"):
        (root / f"cars_{part}").mkdir()
        rows = [
            (*box_of(index), 1 + index % 3, f"{index + 1:05d}.jpg") for index in range(30 if part == "train" else 6)
        ]
        table = {"annotations": struct_array([*BOX_FIELDS, "class", "fname"], rows)}
        file = "devkit/cars_train_annos.mat" if part == "train" else f"{labels_in}cars_test_annos_withlabels.mat"
        savemat(root / file, table)
    savemat(root / "devkit/cars_meta.mat", {"class_names": cell_array(CLASS_NAMES)})
    return root


def write_single_table(root: Path) -> Path:
    (root / "car_ims").mkdir(parents=True)
    fields = ["relative_im_path", *BOX_FIELDS, "class", "test"]
    rows = [(f"car_ims/{index + 1:06d}.jpg", *box_of(index), 1 + index % 3, int(index >= 30)) for index in range(36)]
    savemat(
        root / "cars_annos.mat", {"annotations": struct_array(fields, rows), "class_names": cell_array(CLASS_NAMES)}
    )
    return root


@pytest.mark.parametrize("labels_in", ["devkit/", ""])
def test_devkit_layout(tmp_path, labels_in):
    root = write_devkit(tmp_path / "cars", labels_in)
    dataset = open_dataset(root)
    assert (dataset.kind, dataset.classes) == ("cars", tuple(CLASS_NAMES))
    # Matlab's box 1..11 x 2..22 covers pixels 0..10 and 1..21: edges 0, 1, 11, 22.
    assert dataset.test[0] == Sample("cars_test/00001.jpg", 0, (0.0, 1.0, 11.0, 22.0))
    assert [sample.label for sample in dataset.test] == [0, 1, 2, 0, 1, 2]
    train = {sample.path: sample.label for sample in dataset.train + dataset.val}
    assert train == {f"cars_train/{index + 1:05d}.jpg": index % 3 for index in range(30)}
    assert sorted(sample.label for sample in dataset.val) == [0, 1, 2]


def test_single_table_layout(tmp_path):
    dataset = open_dataset(write_single_table(tmp_path / "cars"))
    assert (dataset.kind, dataset.classes) == ("cars", tuple(CLASS_NAMES))
    assert dataset.test == tuple(
        Sample(f"car_ims/{index + 1:06d}.jpg", index % 3, (index, index + 1, index + 11, index + 22))
        for index in range(30, 36)
    )
    assert len(dataset.train) == 27
    assert sorted(sample.label for sample in dataset.val) == [0, 1, 2]


def test_full_images_and_the_parent_folder(tmp_path):
    write_devkit(tmp_path / "stanford_cars", "")
    dataset = open_dataset(tmp_path, full_images=True)
    assert dataset.root == tmp_path / "stanford_cars"
    assert {sample.box for sample in dataset.all_samples()} == {None}


def test_missing_or_damaged_annotations(tmp_path):
    root = write_devkit(tmp_path / "a", "")
    (root / "cars_test_annos_withlabels.mat").unlink()
    with pytest.raises(UserError, match=r"no cars_test_annos_withlabels\.mat"):
        open_dataset(root)

    root = write_devkit(tmp_path / "b", "")
    (root / "devkit/cars_meta.mat").write_bytes(b"<html>")
    with pytest.raises(UserError, match=r"cars_meta\.mat cannot be read"):
        open_dataset(root)

    root = write_devkit(tmp_path / "c", "")
    savemat(root / "devkit/cars_meta.mat", {"class_names": cell_array(CLASS_NAMES[:2])})
    with pytest.raises(UserError, match="class 3 of 2"):
        open_dataset(root)

    root = write_devkit(tmp_path / "d", "")
    savemat(root / "devkit/cars_train_annos.mat", {"annotations": struct_array(BOX_FIELDS, [(1, 1, 2, 2)])})
    with pytest.raises(UserError, match="lack a field"):
        open_dataset(root)
