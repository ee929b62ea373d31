"""Image folders as people have them, and how their missing parts are held out."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from likethat.data.dataset import DataSet, Sample, hold_out
from likethat.data.formats import open_dataset
from likethat.errors import UserError


def fill(root: Path, *paths: str) -> Path:
    """Opening a folder looks at names only, so the files may be empty."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return root


def numbered(folder: str, count: int) -> list[str]:
    return [f"{folder}/{index:03d}.jpg" for index in range(count)]


def paths_of(samples: tuple[Sample, ...]) -> list[str]:
    return [sample.path for sample in samples]


def counts(dataset: DataSet, label: int) -> tuple[int, ...]:
    return tuple(sum(sample.label == label for sample in dataset.part(part)) for part in ("train", "val", "test"))


def test_three_parts_are_taken_as_they_are(tmp_path):
    fill(
        tmp_path, "train/b/2.jpg", "train/b/1.PNG", "train/a/x.webp", "valid/a/v.jpeg", "test/b/t.tif", "extra/c/1.jpg"
    )
    dataset = open_dataset(tmp_path)
    assert (dataset.kind, dataset.classes, dataset.held_out) == ("folder", ("a", "b"), ())
    assert dataset.train == (Sample("train/a/x.webp", 0), Sample("train/b/1.PNG", 1), Sample("train/b/2.jpg", 1))
    assert dataset.val == (Sample("valid/a/v.jpeg", 0),)
    assert dataset.test == (Sample("test/b/t.tif", 1),)
    assert dataset.all_samples() == dataset.train + dataset.val + dataset.test


@pytest.mark.parametrize("name", ["val", "valid", "validation", "Val"])
def test_names_of_the_validation_folder(tmp_path, name):
    fill(tmp_path, "train/a/1.jpg", "train/b/1.jpg", f"{name}/a/2.jpg", "test/b/2.jpg")
    assert paths_of(open_dataset(tmp_path).val) == [f"{name}/a/2.jpg"]


def test_only_image_files_count_at_any_depth(tmp_path):
    images = ["a/0.jpg", "a/1.JPEG", "a/2.png", "a/3.WebP", "a/4.gif", "a/5.bmp", "a/6.tif", "a/7.TIFF"]
    fill(tmp_path, *images, "a/deep/er/9.jpg", *numbered("b", 5))
    fill(
        tmp_path,
        "a/notes.txt",
        "a/.DS_Store",
        "a/._0.jpg",
        "a/meta.json",
        "a/.cache/1.jpg",
        ".git/x/1.jpg",
        "readme.jpg",
    )
    dataset = open_dataset(tmp_path)
    assert dataset.classes == ("a", "b")
    found = sorted(sample.path for sample in dataset.all_samples() if sample.label == 0)
    assert found == sorted([*images, "a/deep/er/9.jpg"])


@pytest.mark.parametrize(
    ("given_parts", "expected"),
    [
        ((), (70, 10, 20)),  # CLASS/* alone: of 100
        (("train",), (70, 10, 20)),
        (("train", "val"), (80, 5, 20)),
        (("train", "test"), (90, 10, 5)),
        (("train", "val", "test"), (100, 5, 5)),
    ],
)
def test_missing_parts_are_held_out_of_train(tmp_path, given_parts, expected):
    for name in ("a", "b"):
        fill(tmp_path, *numbered(f"train/{name}" if given_parts else name, 100))
        for part in given_parts[1:]:
            fill(tmp_path, *numbered(f"{part}/{name}", 5))
    dataset = open_dataset(tmp_path)
    assert counts(dataset, 0) == counts(dataset, 1) == expected
    assert set(dataset.held_out) == {"val", "test"} - set(given_parts)
    assert len({sample.path for sample in dataset.all_samples()}) == sum(expected) * 2


def test_an_unlabelled_test_folder_is_no_test_part(tmp_path):
    fill(tmp_path, *numbered("train/a", 10), *numbered("train/b", 10), "test/1.jpg", "test/2.jpg")
    dataset = open_dataset(tmp_path)
    assert all(sample.path.startswith("train/") for sample in dataset.test)
    assert counts(dataset, 0) == (7, 1, 2)


def test_the_split_hangs_on_the_seed_and_nothing_else(tmp_path):
    fill(tmp_path, *numbered("a", 50), *numbered("b", 50))
    assert open_dataset(tmp_path, seed=3) == open_dataset(str(tmp_path), seed=3)
    assert set(open_dataset(tmp_path, seed=3).test) != set(open_dataset(tmp_path, seed=4).test)


def test_a_new_file_moves_nothing_in_other_classes_and_little_in_its_own(tmp_path):
    fill(tmp_path, *numbered("a", 50), *numbered("b", 50), *numbered("c", 50))
    before = open_dataset(tmp_path)
    fill(tmp_path, "b/new.jpg")
    after = open_dataset(tmp_path)
    for part in ("train", "val", "test"):
        old, new = set(before.part(part)), set(after.part(part))
        assert {sample for sample in old if sample.label != 1} == {sample for sample in new if sample.label != 1}
        assert len(old - new) <= 2


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    fractions=st.lists(st.floats(0.01, 0.45), max_size=2),
    seed=st.integers(-5, 5),
)
def test_holding_out_is_stratified_and_leaves_a_training_image(sizes, fractions, seed):
    classes = [f"class {label}" for label in range(len(sizes))]
    samples = [Sample(f"{label}/{index}", label) for label, size in enumerate(sizes) for index in range(size)]
    rest, *held = hold_out(samples, classes, fractions, seed=seed)
    assert Counter(samples) == Counter(rest) + sum((Counter(part) for part in held), Counter())
    for label, size in enumerate(sizes):
        assert sum(sample.label == label for sample in rest) >= min(size, 1)
        for part, fraction in zip(held, fractions, strict=True):
            count = sum(sample.label == label for sample in part)
            if size > len(fractions):
                assert count >= 1
                assert abs(count - fraction * size) <= 1
    assert hold_out(samples[::-1], classes, fractions, seed=seed) == [rest, *held]


def test_a_class_may_be_called_train(tmp_path):
    fill(tmp_path, *numbered("train", 5), *numbered("bus", 5), *numbered("test", 5))
    assert open_dataset(tmp_path).classes == ("bus", "test", "train")


RUN = '{"format": 1, "likethat": "0.1.0"}'


@pytest.mark.parametrize("place", ["run", "runs/first", "a/run", "train"])
@pytest.mark.parametrize(
    "made",
    [
        {"config.json": RUN, "prototypes/0.jpg": ""},
        {"checkpoints/pixels.npy": ""},
        {"explanations.html": "", "explanations.json": "{}", "owl.png": ""},
        {"index.html": "", "atlas.json": "{}", "pictures/0.webp": ""},
        {"table.md": "", "table.json": "{}", "seed0/resnet34/baseline.log": ""},
    ],
    ids=["run", "begun", "explanations", "atlas", "study"],
)
def test_what_likethat_made_among_the_images_is_left_out(tmp_path, place, made):
    fill(tmp_path, *numbered("a", 5), *numbered("b", 5))
    before = open_dataset(tmp_path)
    for name, text in made.items():
        fill(tmp_path / place, name)
        (tmp_path / place / name).write_text(text)
    assert open_dataset(tmp_path) == before


@pytest.mark.parametrize("text", ['{"model_type": "vit"}', '{"format": 1}', "[]", "{"])
def test_other_programs_files_do_not_hide_a_class(tmp_path, text):
    fill(tmp_path, *numbered("a", 5), *numbered("b", 5), "b/table.json", "b/atlas.json", *numbered("c/checkpoints", 5))
    (tmp_path / "b" / "config.json").write_text(text)
    assert open_dataset(tmp_path).classes == ("a", "b", "c")


def test_linked_folders_are_followed_but_not_in_circles(tmp_path):
    fill(tmp_path, *numbered("elsewhere/pictures", 4), *numbered("set/a", 4))
    os.symlink(tmp_path / "elsewhere/pictures", tmp_path / "set/b")
    os.symlink(tmp_path / "set/a", tmp_path / "set/a/again")
    dataset = open_dataset(tmp_path / "set")
    assert sorted(sample.path for sample in dataset.all_samples()) == numbered("a", 4) + numbered("b", 4)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no images in class folders"),
        (["1.jpg", "2.jpg"], "no images in class folders"),
        (["a/notes.txt", "b/notes.txt"], "no images in class folders"),
        (["train/1.jpg", "test/2.jpg"], r"train has no images in class folders"),
        (["a/1.jpg", "a/2.jpg"], "single class, a,.*one folder per class"),
        (["birds/a/1.jpg", "birds/b/1.jpg"], "did you mean .*birds"),
        (["train/a/1.jpg"], "single class"),
        (["train/a/1.jpg", "train/b/1.jpg", "val/c/1.jpg", "val/d/1.jpg"], "classes that .*train has not: c, d"),
        (["train/a/1.jpg", "train/b/1.jpg", "test/z/1.jpg"], "has not: z"),
        (["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "valid/b/1.jpg"], "both val and valid"),
        (["val/a/1.jpg", "test/a/1.jpg"], "no train folder"),
    ],
)
def test_mistakes_get_a_remedy(tmp_path, files, message):
    fill(tmp_path, *files)
    with pytest.raises(UserError, match=message):
        open_dataset(tmp_path)


def test_no_folder(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        open_dataset(tmp_path / "missing")
    fill(tmp_path, "file.zip")
    with pytest.raises(UserError, match=r"is a file.*unpack"):
        open_dataset(tmp_path / "file.zip")


@pytest.mark.parametrize("fractions", [(0.0, 0.2), (0.1, 0.0), (0.5, 0.5), (float("nan"), 0.2)])
def test_impossible_fractions(tmp_path, fractions):
    fill(tmp_path, *numbered("a", 5), *numbered("b", 5))
    with pytest.raises(UserError, match="together below 1"):
        open_dataset(tmp_path, val_fraction=fractions[0], test_fraction=fractions[1])


def test_unknown_part(tmp_path):
    fill(tmp_path, *numbered("a", 5), *numbered("b", 5))
    with pytest.raises(UserError, match="train, val, test"):
        open_dataset(tmp_path).part("dev")


def test_opening_and_checking_a_folder_loads_neither_torch_nor_scipy(tmp_path):
    fill(tmp_path, *numbered("a", 5), *numbered("b", 5))
    code = (
        "import sys; from likethat.data.formats import open_dataset; from likethat.data.check import check_dataset; "
        f"check_dataset(open_dataset({str(tmp_path)!r})); print([m for m in ('torch', 'scipy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
