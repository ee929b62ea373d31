"""CUB-200-2011: a small one written here in its layout, and the real one where it is at hand."""

import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from likethat.data.cache import load_dataset
from likethat.data.check import check_dataset
from likethat.data.dataset import Sample
from likethat.data.decode import View
from likethat.data.formats import open_dataset
from likethat.data.parts import read_parts
from likethat.errors import UserError

SHARED_CUB = Path(__file__).parents[3] / "shared" / "cub"


@pytest.fixture
def small_cub(tmp_path: Path) -> Path:
    root = tmp_path / "CUB_200_2011"
    (root / "images").mkdir(parents=True)
    tables = {
        "classes.txt": "1 001.Black_footed_Albatross\n2 002.Laysan_Albatross\n",
        "images.txt": "".join(f"{index} {1 + index % 2:03d}.X/bird {index}.jpg\n" for index in range(1, 13)),
        "image_class_labels.txt": "".join(f"{index} {1 + index % 2}\n" for index in range(1, 13)),
        "train_test_split.txt": "".join(f"{index} {int(index <= 8)}\n" for index in range(1, 13)),
        "bounding_boxes.txt": "".join(f"{index} {index}.0 2.0 10.5 20.0\n" for index in range(1, 13)),
    }
    for name, text in tables.items():
        (root / name).write_text(text)
    return root


def test_parts_follow_the_crop(small_cub: Path) -> None:
    dataset = open_dataset(small_cub)
    assert read_parts(dataset) is None
    (small_cub / "parts").mkdir()
    (small_cub / "parts/parts.txt").write_text("1 back\n2 left eye\n3 right eye\n")
    (small_cub / "parts/part_locs.txt").write_text("9 1 0.0 0.0 0\n9 3 9.0 22.0 1\n")
    table = read_parts(dataset)
    assert table is not None
    assert table.sides == [0, 1, 1]
    sample = next(sample for sample in dataset.test if "bird 9" in sample.path)
    view = View((9, 2, 19, 22), (10, 10), (99, 99))
    part_NQ4, object_N4 = table.shares([sample], [view])
    assert np.isnan(part_NQ4[0, :2]).all()
    assert part_NQ4[0, 2].tolist() == pytest.approx([0, 1, 0, 1])
    assert object_N4[0].tolist() == pytest.approx([0, 0, 1.05, 1])
    (small_cub / "parts/part_locs.txt").write_text("9 1 nowhere\n")
    with pytest.raises(UserError, match=r"part_locs.txt is damaged"):
        read_parts(dataset)


def test_labels_split_and_boxes(small_cub):
    dataset = open_dataset(small_cub)
    assert (dataset.kind, dataset.root, dataset.held_out) == ("cub", small_cub, ("val",))
    assert dataset.classes == ("001.Black_footed_Albatross", "002.Laysan_Albatross")
    assert len(dataset.train) == 6
    assert {sample.label for sample in dataset.val} == {0, 1}
    assert dataset.test == tuple(
        Sample(f"images/{1 + index % 2:03d}.X/bird {index}.jpg", index % 2, (index, 2.0, index + 10.5, 22.0))
        for index in range(9, 13)
    )
    assert open_dataset(small_cub.parent) == dataset


def test_full_images_need_no_boxes(small_cub):
    (small_cub / "bounding_boxes.txt").unlink()
    with pytest.raises(UserError, match=r"bounding_boxes.txt is missing.*--full-images"):
        open_dataset(small_cub)
    dataset = open_dataset(small_cub, full_images=True)
    assert all(sample.box is None for sample in dataset.all_samples())


@pytest.mark.parametrize(
    ("table", "text", "message"),
    [
        ("image_class_labels.txt", "1 1\n", "do not agree on image 2"),
        ("train_test_split.txt", "1 1\n2\n", "line 2"),
        ("bounding_boxes.txt", "1 5.0 5.0\n", "image 1 has no box"),
        ("classes.txt", None, "classes.txt cannot be read"),
    ],
)
def test_damaged_tables(small_cub, table, text, message):
    if text is None:
        (small_cub / table).unlink()
    else:
        (small_cub / table).write_text(text)
    with pytest.raises(UserError, match=message):
        open_dataset(small_cub)


@pytest.mark.skipif(not (SHARED_CUB / "images-0.tar").is_file(), reason="the real CUB-200-2011 is not at hand")
def test_the_real_data(tmp_path):
    with tarfile.open(SHARED_CUB / "annotations.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    dataset = open_dataset(tmp_path)
    assert len(dataset.classes) == 200
    assert dataset.classes[0] == "001.Black_footed_Albatross"
    assert len(dataset.train) + len(dataset.val) == 5994
    assert len(dataset.test) == 5794
    per_class = Counter(sample.label for sample in dataset.val)
    assert set(per_class.values()) == {3}  # 29 or 30 training images a class
    assert len(per_class) == 200

    wanted = {sample.path for sample in dataset.all_samples() if sample.label in (0, 1)}
    with tarfile.open(SHARED_CUB / "images-0.tar") as archive:
        members = [member for member in archive if member.name.removeprefix("CUB_200_2011/") in wanted]
        archive.extractall(tmp_path, members=members, filter="data")
    two = type(dataset)(
        dataset.root,
        dataset.kind,
        dataset.classes[:2],
        *(tuple(sample for sample in dataset.part(part) if sample.label < 2) for part in ("train", "val", "test")),
        held_out=dataset.held_out,
    )
    assert len(members) == len(two.all_samples()) == 120
    loaded = load_dataset(two, (64, 48))
    assert loaded.report.problems == check_dataset(two).problems == ()
    sample, row = two.test[5], loaded.pixels["test"][5]
    x0, y0, x1, y1 = (round(edge) for edge in sample.box)
    with Image.open(two.root / sample.path) as image:
        bird = image.convert("RGB").crop((x0, y0, min(x1, image.width), min(y1, image.height)))
    assert np.array_equal(row, np.asarray(bird.resize((48, 64), Image.Resampling.BILINEAR)))
