"""Groups stay whole, and parts are as even as groups allow."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from likethat.data.check import check_dataset
from likethat.data.dataset import Sample
from likethat.data.formats import open_dataset
from likethat.data.groups import hold_out_groups
from likethat.errors import UserError

FRACTIONS = (0.2, 0.1)


def samples_of(groups: list[list[int]]) -> list[Sample]:
    """A group for each list of labels; an empty name is no group."""
    return [
        Sample(f"{group}-{number}", label, group=f"g{group}")
        for group, labels in enumerate(groups)
        for number, label in enumerate(labels)
    ]


groups_of_any = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(groups=groups_of_any, alone=st.integers(0, 10), seed=st.integers(0, 3), data=st.randoms())
def test_groups_never_lie_in_two_parts_and_training_has_every_class(groups, alone, seed, data):
    samples = samples_of(groups) + [Sample(f"alone{number}", number % 4) for number in range(alone)]
    parts = hold_out_groups(samples, FRACTIONS, seed=seed)
    assert sorted(s.path for part in parts for s in part) == sorted(s.path for s in samples)
    names = [{s.group for s in part if s.group is not None} for part in parts]
    assert sum(map(len, names)) == len(set().union(*names))
    assert {s.label for s in parts[0]} == {s.label for s in samples}
    shuffled = list(samples)
    data.shuffle(shuffled)
    again = hold_out_groups(shuffled, FRACTIONS, seed=seed)
    assert [sorted(s.path for s in part) for part in again] == [sorted(s.path for s in part) for part in parts]


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=25), min_size=1, max_size=4), seed=st.integers(0, 3)
)
def test_groups_of_one_class_fill_every_part_to_within_a_group(sizes, seed):
    samples = samples_of([[label] * size for label, own in enumerate(sizes) for size in own])
    parts = hold_out_groups(samples, FRACTIONS, seed=seed)
    for label, own in enumerate(sizes):
        counts = [sum(sample.label == label for sample in part) for part in parts]
        for count, share in zip(counts, (0.7, *FRACTIONS), strict=True):
            assert abs(count - share * sum(own)) <= max(own) + 1e-9 or len(own) < 10
        filled = [count > 0 for count in counts]
        assert filled == [True, len(own) >= 2, len(own) >= 3], "a class gives each part a group while it keeps one"


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=5, max_size=7), seed=st.integers(0, 3))
def test_the_parts_are_nearly_as_even_as_the_best_of_all_splits(sizes, seed):
    samples = samples_of([[0] * size for size in sizes])
    wanted = [share * len(samples) for share in (0.7, *FRACTIONS)]

    def unevenness(counts: list[float]) -> float:
        return max(abs(count - share) for count, share in zip(counts, wanted, strict=True))

    best = min(
        unevenness([sum(s for s, p in zip(sizes, chosen, strict=True) if p == part) for part in range(3)])
        for chosen in product(range(3), repeat=len(sizes))
        if len(set(chosen)) == 3
    )
    found = unevenness([len(part) for part in hold_out_groups(samples, FRACTIONS, seed=seed)])
    assert found <= best + max(sizes)


def test_another_seed_gives_another_split():
    samples = samples_of([[n % 2] * 3 for n in range(60)])
    assert {s.group for s in hold_out_groups(samples, FRACTIONS, seed=0)[1]} != {
        s.group for s in hold_out_groups(samples, FRACTIONS, seed=1)[1]
    }


def test_patients_with_pictures_of_several_classes_are_shared_evenly():
    rng = np.random.default_rng(0)
    samples = samples_of([rng.choice(3, 1 + int(rng.integers(1, 6)), p=[0.7, 0.25, 0.05]).tolist() for _ in range(400)])
    total = Counter(sample.label for sample in samples)
    for part, share in zip(hold_out_groups(samples, FRACTIONS, seed=0), (0.7, *FRACTIONS), strict=True):
        counts = Counter(sample.label for sample in part)
        assert all(abs(counts[label] / total[label] - share) < 0.03 for label in total)


@pytest.fixture
def patients(tmp_path: Path) -> Path:
    """A table of 20 patients with three pictures each, and of one patient who alone has a rare disease."""
    rng, lines = np.random.default_rng(0), ["path,label,group"]
    for number in range(63):
        Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
        patient = number // 3
        lines.append(f"{number}.png,{'rare' if patient == 20 else 'ab'[patient % 2]},Miller {patient}")
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "t.csv"


def test_a_class_of_too_few_groups_is_told_of(patients: Path) -> None:
    report = check_dataset(open_dataset(patients))
    (problem,) = report.problems
    assert (problem.path, problem.kind, problem.is_warning) == ("rare", "too few", True)
    assert "too few groups to hold any out for test and val" in problem.text
    assert report.notes == ()


def test_a_split_that_tears_a_group_apart_is_refused_without_its_name(patients: Path) -> None:
    head, *lines = patients.read_text().splitlines()
    parts = ["train"] * 57 + ["test"] * 6
    parts[2] = "test"
    rows = [f"{line},{part}" for line, part in zip(lines, parts, strict=True) if "rare" not in line]
    patients.write_text("\n".join([f"{head},split", *rows]))
    with pytest.raises(
        UserError, match="row 4: the picture is in test, and that of row 2, of the same group, in train"
    ) as told:
        open_dataset(patients)
    assert "Miller" not in str(told.value)
    assert "1 more" not in str(told.value)
