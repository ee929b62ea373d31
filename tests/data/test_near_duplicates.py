"""Pictures that were taken of one thing, one after the other, are found between splits; others are not."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from likethat.cli.parser import main
from likethat.data import near_duplicates
from likethat.data.check import check_dataset
from likethat.data.dataset import DataSet, Sample
from likethat.data.formats import open_dataset
from likethat.data.near_duplicates import ALIKE, OTHER_CLASS, find_near_duplicates


def scene(seed: int, side: int = 128) -> Image.Image:
    """Draw something with large and small things in it, as photographs have."""
    rng = np.random.default_rng(seed)
    pixels = sum(
        np.asarray(
            Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)).resize(
                (side, side), Image.Resampling.BICUBIC
            ),
            float,
        )
        * share
        for cells, share in ((4, 0.5), (9, 0.3), (24, 0.2))
    )
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def compressed(image: Image.Image) -> Image.Image:
    buffer = io.BytesIO()
    image.resize((90, 90)).save(buffer, "JPEG", quality=60)
    return Image.open(io.BytesIO(buffer.getvalue()))


def moved(image: Image.Image) -> Image.Image:
    return image.crop((2, 1, image.width, image.height - 1))


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "compressed": compressed,
    "moved": moved,
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.2),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three parts of unlike scenes; some test pictures are those of training, changed."""
    for number in range(24):
        part = "train" if number < 12 else "val" if number < 18 else "test"
        target = tmp_path / "data" / part / "ab"[number % 2] / f"{number}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        scene(number).save(target)
    for number, (name, change) in enumerate(CHANGES.items()):
        change(scene(2 * number)).save(tmp_path / f"data/test/a/{name}.png")
    return tmp_path / "data"


def test_bursts_are_found_and_other_scenes_are_not(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = check_dataset(open_dataset(data))
    assert report.problems == ()
    assert {(pair.path, pair.other) for pair in report.near_duplicates} == {
        (f"test/a/{name}.png", f"train/a/{2 * number}.png") for number, name in enumerate(CHANGES)
    }
    bits = [pair.bits for pair in report.near_duplicates]
    assert bits == sorted(bits)
    (note,) = report.notes
    assert note.startswith("3 of 9 test pictures look nearly like one of an earlier split")
    assert main(["data", "check", str(data), "--json", "--pairs", str(data.parent / "pairs.jpg")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["notes"] == [note]
    assert [pair["path"] for pair in document["near_duplicates"]] == [pair.path for pair in report.near_duplicates]
    assert Image.open(data.parent / "pairs.jpg").width > 900  # three pairs


def test_with_groups_nobody_looks(data: Path) -> None:
    lines = ["path,label,group,split"]
    for path in sorted(data.rglob("*.png")):
        part, label, _ = path.relative_to(data).parts
        lines.append(f"{path.relative_to(data)},{label},{path.stem},{part}")
    (data / "t.csv").write_text("\n".join(lines))
    assert check_dataset(open_dataset(data / "t.csv")).near_duplicates == ()


def test_without_the_package_it_is_told(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "imagehash", None)
    near_duplicates.find_hasher.cache_clear()
    try:
        report = check_dataset(open_dataset(data))
    finally:
        monkeypatch.undo()
        near_duplicates.find_hasher.cache_clear()
    assert report.near_duplicates == ()
    assert report.notes == (near_duplicates.MISSING,)


def random_looks(train: int, test: int) -> tuple[DataSet, dict[str, str], np.ndarray, np.ndarray]:
    """Looks of which every tenth of test is one of train with up to a fifth of its bits changed."""
    rng = np.random.default_rng(0)
    bit_NF, bit_MF = rng.random((test, 256)) < 0.5, rng.random((train, 256)) < 0.5
    for row in range(0, test, 10):
        bit_NF[row] = bit_MF[row] ^ (rng.random(256) < 0.2 * rng.random())
    samples = [
        tuple(Sample(f"{part}{n}", n % 3) for n in range(count)) for part, count in (("train", train), ("test", test))
    ]
    dataset = DataSet(Path("nowhere"), "folder", ("a", "b", "c"), samples[0], (), samples[1])
    rows = [*bit_MF, *bit_NF]
    looks = {s.path: np.packbits(row).tobytes().hex() for s, row in zip(dataset.all_samples(), rows, strict=True)}
    return dataset, looks, bit_NF, bit_MF


def test_the_search_finds_what_comparing_each_with_each_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, looks, bit_NF, bit_MF = random_looks(300, 200)
    expected = {}
    for n, own in enumerate(bit_NF):
        for m, other in enumerate(bit_MF):
            bits = int((own != other).sum())
            allowed = ALIKE if n % 3 == m % 3 else ALIKE - OTHER_CLASS
            if bits <= allowed and bits < expected.get(f"test{n}", ("", 999))[1]:
                expected[f"test{n}"] = f"train{m}", bits
    assert len(expected) >= 15
    unlike = {path: path for path in looks}
    found = find_near_duplicates(dataset, looks, unlike)
    assert {pair.path: (pair.other, pair.bits) for pair in found} == expected
    monkeypatch.setattr(near_duplicates, "CHUNK", 700)
    assert find_near_duplicates(dataset, looks, unlike) == found
    same_files = dict.fromkeys(looks, "one and the same")
    assert find_near_duplicates(dataset, looks, same_files) == ()
    # Of very many pictures only those are compared that agree in some of the low frequencies: nearly all are found.
    monkeypatch.setattr(near_duplicates, "MOST_PAIRS", 0)
    monkeypatch.setattr(near_duplicates, "KEY_CHUNK", 50)
    some = {pair.path: (pair.other, pair.bits) for pair in find_near_duplicates(dataset, looks, unlike)}
    assert some.items() <= expected.items()
    assert len(some) >= 0.8 * len(expected)
