"""All problems of a folder are found at once; the pixels come with them in one pass."""

import hashlib
import itertools
import os
import signal
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from likethat.data.cache import decode_samples, load_dataset, remove_cache
from likethat.data.check import check_dataset
from likethat.data.dataset import DataSet, Sample
from likethat.data.decode import read_image, to_input
from likethat.data.formats import open_dataset
from likethat.data.journal import journal_of
from likethat.data.reading import workers
from likethat.errors import UserError


def write_picture(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (20 + seed % 7, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def good_set(tmp_path: Path) -> DataSet:
    seeds = itertools.count()
    for part, count in (("train", 4), ("val", 2), ("test", 2)):
        for name, index in itertools.product(("a", "b"), range(count)):
            write_picture(tmp_path / part / name / f"{index}.png", next(seeds))
    return open_dataset(tmp_path)


@pytest.fixture
def bad_set(good_set: DataSet) -> DataSet:
    root = good_set.root
    whole = (root / "train/a/0.png").read_bytes()
    (root / "train/a/5_cut.png").write_bytes(whole[: len(whole) // 2])
    (root / "train/a/6_empty.jpg").touch()
    (root / "train/a/6_empty_too.jpg").touch()  # broken files of the same bytes are not called duplicates as well
    (root / "train/b/7_page.jpg").write_bytes(b"<html>not found</html>")
    bomb = bytearray(whole)
    bomb[16:24] = struct.pack(">II", 60_000, 60_000)
    bomb[29:33] = struct.pack(">I", zlib.crc32(bomb[12:29]))
    (root / "val/b/8_bomb.png").write_bytes(bomb)
    (root / "train/a/9_twin.png").write_bytes(whole)
    (root / "train/b/9_other_class.png").write_bytes(whole)
    (root / "test/a/9_leak.png").write_bytes((root / "train/a/1.png").read_bytes())
    return open_dataset(root)


BAD = {
    "train/a/5_cut.png": "truncated",
    "train/a/6_empty.jpg": "empty",
    "train/a/6_empty_too.jpg": "empty",
    "train/b/7_page.jpg": "unreadable",
    "val/b/8_bomb.png": "bomb",
    "train/a/9_twin.png": "duplicate",
    "train/b/9_other_class.png": "duplicate",
    "test/a/9_leak.png": "duplicate",
}


def test_a_good_set_has_no_problems(good_set):
    calls = []
    report = check_dataset(good_set, progress=lambda done, total: calls.append((done, total)))
    assert report.problems == ()
    assert report.without_bad() == good_set
    assert report.sha256 == {
        sample.path: hashlib.sha256((good_set.root / sample.path).read_bytes()).hexdigest()
        for sample in good_set.all_samples()
    }
    assert calls == [(done, 16) for done in range(1, 17)]


def test_all_problems_are_reported_at_once(bad_set):
    report = check_dataset(bad_set)
    assert sorted((problem.path, problem.kind) for problem in report.problems) == sorted(BAD.items())
    text = {problem.path: problem.text for problem in report.problems}
    assert "train/a/0.png" in text["train/a/9_twin.png"]
    assert "of class b instead of a" in text["train/b/9_other_class.png"]
    assert "train/a/1.png, which is in train: the test result" in text["test/a/9_leak.png"]
    assert [problem.path for problem in report.warnings] == ["train/a/9_twin.png"]
    assert len(report.errors) == len(BAD) - 1
    kept = report.without_bad()
    assert [sample.path for sample in kept.all_samples()] == [
        sample.path for sample in bad_set.all_samples() if sample.path not in BAD
    ]
    assert check_dataset(kept).problems == ()


def test_a_vanished_file_is_unreadable(good_set):
    (good_set.root / "val/a/1.png").unlink()
    report = check_dataset(good_set)
    assert [(problem.path, problem.kind) for problem in report.problems] == [("val/a/1.png", "unreadable")]
    assert "No such file" in str(report.problems[0])
    assert "val/a/1.png" not in report.sha256


def test_classes_with_too_few_images(tmp_path):
    for name, count in (("one", 1), ("two", 2), ("three", 3), ("broken", 3)):
        for index in range(count):
            write_picture(tmp_path / name / f"{index}.png", sum(name.encode()) + index)
    (tmp_path / "broken/0.png").write_bytes(b"")
    (tmp_path / "none").mkdir()
    report = check_dataset(open_dataset(tmp_path))
    few = {problem.path: problem.text for problem in report.problems if problem.kind == "too few"}
    assert sorted(few) == ["broken", "none", "one", "two"]
    assert "has 2 good training images" in few["broken"]
    with pytest.raises(UserError, match="no good training image is left of none"):
        report.without_bad()


def test_where_nothing_is_held_out_one_training_image_is_enough(good_set):
    for index in (1, 2, 3):
        (good_set.root / f"train/a/{index}.png").unlink()
    dataset = open_dataset(good_set.root)
    assert check_dataset(dataset).problems == ()
    (good_set.root / "train/a/0.png").write_bytes(b"junk")
    assert [problem.kind for problem in check_dataset(dataset).problems] == ["unreadable", "too few"]


def test_no_part_may_lose_all_its_images(good_set):
    for sample in good_set.val:
        (good_set.root / sample.path).write_bytes(b"junk")
    with pytest.raises(UserError, match="no good validation image is left"):
        check_dataset(good_set).without_bad()


def expected_pixels(dataset: DataSet, samples: tuple[Sample, ...], size_hw: tuple[int, int]) -> np.ndarray:
    rows = [to_input(read_image(dataset.root / sample.path), sample.box, size_hw)[0] for sample in samples]
    return np.stack(rows)


@pytest.mark.parametrize("workers", [1, 5, None])
def test_decoded_rows_belong_to_their_samples(good_set, workers):
    samples = tuple(replace(sample, box=(index, 1, index + 9, 12)) for index, sample in enumerate(good_set.train))
    decoded = decode_samples(good_set.root, samples, (8, 12), workers=workers)
    assert np.array_equal(decoded.pixels, expected_pixels(good_set, samples, (8, 12)))
    assert decoded.sha256 == [hashlib.sha256((good_set.root / s.path).read_bytes()).hexdigest() for s in samples]
    assert decoded.problems == []


def test_bad_rows_are_zero_and_listed(bad_set):
    decoded = decode_samples(bad_set.root, bad_set.train, (8, 8))
    bad = {problem.path: problem.kind for problem in decoded.problems}
    assert bad == {path: kind for path, kind in BAD.items() if path.startswith("train") and kind != "duplicate"}
    for row, sample in zip(decoded.pixels, bad_set.train, strict=True):
        assert row.any() == (sample.path not in bad)


def test_the_cache_file_holds_the_same_pixels(bad_set, tmp_path):
    file = tmp_path / "new" / "pixels.npy"
    on_disk = decode_samples(bad_set.root, bad_set.train, (8, 8), cache_file=file)
    in_memory = decode_samples(bad_set.root, bad_set.train, (8, 8))
    assert isinstance(on_disk.pixels, np.memmap)
    assert np.array_equal(on_disk.pixels, in_memory.pixels)
    assert np.array_equal(np.load(file), in_memory.pixels)
    assert (on_disk.sha256, on_disk.problems) == (in_memory.sha256, in_memory.problems)
    remove_cache(file)
    assert list(file.parent.iterdir()) == []


@pytest.mark.parametrize("on_disk", [False, True])
def test_processes_find_what_threads_find(bad_set, tmp_path, monkeypatch, on_disk):
    def decode(name):
        file = tmp_path / name / "pixels.npy" if on_disk else None
        return decode_samples(bad_set.root, bad_set.all_samples(), (8, 8), cache_file=file, with_looks=True)

    by_threads, report = decode("threads"), check_dataset(bad_set)
    monkeypatch.setattr(workers, "MANY", 1)
    by_processes = decode("processes")
    assert np.array_equal(by_threads.pixels, by_processes.pixels)
    assert by_threads.problems
    for name in ("sha256", "problems", "views", "facts", "looks"):
        assert getattr(by_threads, name) == getattr(by_processes, name), name
    assert check_dataset(bad_set) == report
    if on_disk:
        one, other = (journal_of(tmp_path / name / "pixels.npy").read_text() for name in ("threads", "processes"))
        assert one == other


KILLED = """
import os, signal, sys
from pathlib import Path
from likethat.data import cache
from likethat.data.formats import open_dataset
from likethat.data.reading import workers
cache.WRITE_DOWN = 2
workers.MANY, workers.TOGETHER, workers.UNDER_WAY = int(sys.argv[3]), 1, 2
def kill(done, total):
    if done == 5:
        os.kill(os.getpid(), signal.SIGKILL)
dataset = open_dataset(sys.argv[1])
cache.decode_samples(dataset.root, dataset.train, (4, 4), cache_file=Path(sys.argv[2]), workers=1, progress=kill)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows kills otherwise")
@pytest.mark.parametrize("many", [workers.MANY, 1])
def test_a_killed_cache_goes_on_where_it_was(good_set, tmp_path, many):
    file, told = tmp_path / "cache" / "pixels.npy", []
    killed = subprocess.run([sys.executable, "-c", KILLED, str(good_set.root), str(file), str(many)])
    assert killed.returncode == -signal.SIGKILL
    expected = decode_samples(good_set.root, good_set.train, (4, 4))
    found = decode_samples(
        good_set.root, good_set.train, (4, 4), cache_file=file, progress=lambda done, total: told.append(done)
    )
    assert told[0] in (5, 6)  # four or five of the eight were done
    assert told[-1] == 8
    assert np.array_equal(found.pixels, expected.pixels)
    assert (found.sha256, found.views) == (expected.sha256, expected.views)


def test_a_finished_cache_is_read_again_only_where_files_changed(bad_set, tmp_path):
    file = tmp_path / "cache" / "pixels.npy"
    samples, told = bad_set.all_samples(), []

    def decode(size_hw=(8, 8), samples=samples):
        told.clear()
        return decode_samples(
            bad_set.root, samples, size_hw, cache_file=file, progress=lambda done, total: told.append(done)
        )

    def same(one, other) -> bool:
        return np.array_equal(one.pixels, other.pixels) and (one.sha256, one.problems, one.views) == (
            other.sha256, other.problems, other.views,
        )  # fmt: skip

    first = decode()
    assert len(told) == len(samples)
    again = decode()
    assert told == []
    assert same(again, decode_samples(bad_set.root, samples, (8, 8)))
    assert same(again, first)
    write_picture(bad_set.root / samples[1].path, 99)
    with journal_of(file).open("a") as journal:
        journal.write('[3, "cut sh')
    changed = decode()
    assert len(told) == 1
    assert same(changed, decode_samples(bad_set.root, samples, (8, 8)))
    decode()
    assert told == []  # the line that was cut short harms no other
    smaller = decode((4, 4))
    assert len(told) == len(samples)
    assert same(smaller, decode_samples(bad_set.root, samples, (4, 4)))
    boxed = tuple(replace(sample, box=(0.0, 0.0, 9.0, 9.0)) for sample in samples)
    assert same(decode((4, 4), boxed), decode_samples(bad_set.root, boxed, (4, 4)))


def test_rows_that_were_moved_are_not_taken_for_others(bad_set, tmp_path):
    file = tmp_path / "cache" / "pixels.npy"
    first = {
        name: pixels.copy()
        for name, pixels in load_dataset(bad_set, (8, 8), skip_bad=True, cache_file=file).pixels.items()
    }
    second = load_dataset(bad_set, (8, 8), skip_bad=True, cache_file=file).pixels
    assert all(np.array_equal(first[part], second[part]) for part in first)


def test_a_cache_larger_than_the_disk_is_refused(good_set, tmp_path):
    with pytest.raises(UserError, match="GB free, and the pixels need"):
        decode_samples(good_set.root, good_set.train * 10**6, (4096, 4096), cache_file=tmp_path / "huge.npy")
    assert not list(tmp_path.glob("huge*"))


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_loading_checks_and_decodes_in_one_pass(bad_set, tmp_path, on_disk, skip_bad):
    file = tmp_path / "cache" / "pixels.npy" if on_disk else None
    loaded = load_dataset(bad_set, (8, 8), skip_bad=skip_bad, cache_file=file)
    assert loaded.report.problems == check_dataset(bad_set).problems
    assert loaded.dataset == (loaded.report.without_bad() if skip_bad else bad_set)
    unreadable = {path for path, kind in BAD.items() if kind != "duplicate"}
    for part in ("train", "val", "test"):
        samples = loaded.dataset.part(part)
        rows = [row for row, sample in enumerate(samples) if sample.path not in unreadable]
        assert len(loaded.pixels[part]) == len(samples)
        expected = expected_pixels(loaded.dataset, tuple(samples[row] for row in rows), (8, 8))
        assert np.array_equal(loaded.pixels[part][rows], expected)
