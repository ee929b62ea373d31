"""What is wrong with a data set's files, all at once: broken pictures, duplicates, classes with too few images."""

import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from PIL import Image

from likethat.data.dataset import PARTS, DataSet, Sample
from likethat.data.decode import ImageError, read_image
from likethat.data.files import read_file
from likethat.distributed import local_world_size
from likethat.errors import UserError
from likethat.progress import Advance

Item = TypeVar("Item")
Result = TypeVar("Result")

# Training, validation and test of one image each.
FEWEST_TO_SPLIT = 3


@dataclass(frozen=True, slots=True)
class DataProblem:
    """Something wrong with a file, or with a class: then `path` is the class's name and `kind` is "too few"."""

    path: str
    kind: str  # unreadable, truncated, empty, bomb, duplicate, too few, left out
    text: str
    is_warning: bool = False  # harmless enough to train with

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


@dataclass(frozen=True)
class Report:
    """All problems of a data set, and the SHA-256 of every file that could be read, by path."""

    dataset: DataSet
    problems: tuple[DataProblem, ...]
    sha256: dict[str, str]

    @property
    def errors(self) -> tuple[DataProblem, ...]:
        return tuple(problem for problem in self.problems if not problem.is_warning)

    @property
    def warnings(self) -> tuple[DataProblem, ...]:
        return tuple(problem for problem in self.problems if problem.is_warning)

    def bad_paths(self) -> frozenset[str]:
        """Return the files that cannot be used, and all but the first of each set of duplicates."""
        return frozenset(problem.path for problem in self.problems if problem.kind != "too few")

    def without_bad(self) -> DataSet:
        """Return the data set less its bad files."""
        bad = self.bad_paths()
        train, val, test = (
            tuple(sample for sample in self.dataset.part(part) if sample.path not in bad) for part in PARTS
        )
        images_of = Counter(sample.label for sample in train)
        if missing := [name for label, name in enumerate(self.dataset.classes) if not images_of[label]]:
            raise UserError(
                f"no good training image is left of {', '.join(missing)}: add images or remove the class's folder"
            )
        if not (val and test):
            raise UserError(f"no good {'validation' if test else 'test'} image is left: add images")
        return replace(self.dataset, train=train, val=val, test=test)


@dataclass(frozen=True, slots=True)
class Examined:
    """One file: its SHA-256 ("" where it could not be read) and either its picture or what is wrong with it."""

    sha256: str
    image: Image.Image | None
    problem: DataProblem | None


def examine(root: Path, sample: Sample) -> Examined:
    """Read the file once and decode it fully: nothing less proves that it is whole."""
    try:
        data = read_file(root / sample.path)
    except OSError as error:
        why = f"cannot be opened ({error.strerror}); restore the file or its permissions"
        return Examined("", None, DataProblem(sample.path, "unreadable", why))
    sha256 = hashlib.sha256(data).hexdigest()
    try:
        return Examined(sha256, read_image(data, name=sample.path), None)
    except ImageError as error:
        return Examined(sha256, None, DataProblem(sample.path, error.kind, error.cause))


def check_dataset(dataset: DataSet, *, workers: int | None = None, progress: Advance | None = None) -> Report:
    """Read and decode every file of the data set and report all that is wrong with it."""

    def judge(sample: Sample) -> tuple[str, DataProblem | None]:
        examined = examine(dataset.root, sample)
        return examined.sha256, examined.problem

    samples = dataset.all_samples()
    hashes, problems = [], []
    for sha256, problem in map_in_threads(judge, samples, workers):
        hashes.append(sha256)
        if problem:
            problems.append(problem)
        if progress:
            progress(len(hashes), len(samples))
    return make_report(dataset, hashes, problems)


def make_report(dataset: DataSet, hashes: Iterable[str], problems: Iterable[DataProblem]) -> Report:
    """Report on what reading the files of `dataset.all_samples()`, in this order, has found."""
    sha256 = {sample.path: value for sample, value in zip(dataset.all_samples(), hashes, strict=True)}
    found = list(problems)
    found += _duplicates(dataset, sha256, {problem.path for problem in found})
    found += _too_few(dataset, {problem.path for problem in found})
    return Report(dataset, tuple(found), {path: value for path, value in sha256.items() if value})


def _duplicates(dataset: DataSet, sha256: dict[str, str], bad: set[str]) -> list[DataProblem]:
    first_with: dict[str, tuple[str, Sample]] = {}
    problems = []
    for part in PARTS:
        for sample in dataset.part(part):
            if sample.path in bad:
                continue
            first_part, first = first_with.setdefault(sha256[sample.path], (part, sample))
            if first is sample:
                continue
            text = f"the same file as {first.path}"
            if first.label != sample.label:
                ours, theirs = dataset.classes[sample.label], dataset.classes[first.label]
                text += f", but of class {ours} instead of {theirs}: one of the two is wrong"
            if first_part != part:
                text += f", which is in {first_part}: the {part} result would count an image already seen"
            harmless = first.label == sample.label and first_part == part
            problems.append(DataProblem(sample.path, "duplicate", f"{text}; delete one of them", is_warning=harmless))
    return problems


def _too_few(dataset: DataSet, bad: set[str]) -> list[DataProblem]:
    good_of = {part: Counter(sample.label for sample in dataset.part(part) if sample.path not in bad) for part in PARTS}
    problems = []
    for label, name in enumerate(dataset.classes):
        to_split = good_of["train"][label] + sum(good_of[part][label] for part in dataset.held_out)
        if dataset.held_out and to_split < FEWEST_TO_SPLIT:
            need = f"at least {FEWEST_TO_SPLIT} are needed to hold images out; add some or remove the class"
            problems.append(DataProblem(name, "too few", f"the class has {to_split} good training images, {need}"))
        elif not good_of["train"][label]:
            problems.append(DataProblem(name, "too few", "the class has no good training image; add some or remove it"))
    return problems


def map_in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None, *, ahead: int = 0
) -> Iterator[Result]:
    """Yield results in order, from one thread per processor unless told otherwise; few are under way at any time, but
    at least `ahead`. Processes on one machine share its processors.

    Pillow lets go of Python's lock while it decodes and resizes, so threads keep the processors busy.
    """
    if workers is None:
        processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        workers = max(1, len(processors) // local_world_size())
    under_way: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                under_way.append(pool.submit(function, item))
                if len(under_way) >= max(8 * workers, ahead):
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
