"""What is wrong with a data set's files, all at once: broken pictures, duplicates, classes with too few images."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from likethat.data.dataset import PARTS, DataSet, Sample
from likethat.data.decode import FileFacts, ImageError, read_image, to_input
from likethat.data.near_duplicates import (
    MISSING,
    NearDuplicate,
    find_hasher,
    find_near_duplicates,
    look_of,
    tell_near_duplicates,
)
from likethat.data.reading.pages import digest_data, read_page
from likethat.data.reading.values import tell_values
from likethat.data.reading.workers import map_many
from likethat.errors import UserError
from likethat.progress import Advance

# Training, validation and test of one image each.
FEWEST_TO_SPLIT = 3
LOOK_SIDE = 224  # pixels of a picture that its look is taken of
OF_CLASSES = ("too few",)  # kinds of problems that are not of a file


@dataclass(frozen=True, slots=True)
class DataProblem:
    """Something wrong with a file, or with a class: then `path` is the class's name and `kind` is "too few"."""

    path: str
    kind: str  # unreadable, truncated, empty, bomb, range, box, mask, duplicate, too few, left out
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
    notes: tuple[str, ...] = ()  # sentences that are good to know
    near_duplicates: tuple[NearDuplicate, ...] = ()

    @property
    def errors(self) -> tuple[DataProblem, ...]:
        return tuple(problem for problem in self.problems if not problem.is_warning)

    @property
    def warnings(self) -> tuple[DataProblem, ...]:
        return tuple(problem for problem in self.problems if problem.is_warning)

    @property
    def counted(self) -> str:
        """Return how many problems there are that training does not go on with."""
        return f"{len(self.errors)} problem{'s' * (len(self.errors) != 1)}"

    def bad_paths(self) -> frozenset[str]:
        """Return the files that cannot be used, and all but the first of each set of duplicates."""
        return frozenset(problem.path for problem in self.problems if problem.kind not in OF_CLASSES)

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

    @property
    def facts(self) -> FileFacts:
        return FileFacts() if self.image is None else self.image.info["facts"]


def examine(root: Path, sample: Sample) -> Examined:
    """Read the file once and decode it fully: nothing less proves that it is whole."""
    try:
        data, page = read_page(root / sample.path)
    except OSError as error:
        why = f"cannot be opened ({error.strerror}); restore the file or its permissions"
        return Examined("", None, _problem(sample, "unreadable", why))
    sha256 = digest_data(data, page)
    try:
        image = read_image(data, name=sample.path, value_range=sample.value_range, page=page)
    except ImageError as error:
        return Examined(sha256, None, _problem(sample, error.kind, error.cause))
    problem = _check_row(root, sample, image.size) if sample.row is not None else None
    return Examined(sha256, None if problem else image, problem)


def _problem(sample: Sample, kind: str, text: str) -> DataProblem:
    return DataProblem(sample.path, kind, text if sample.row is None else f"row {sample.row}: {text}")


def _check_row(root: Path, sample: Sample, size_wh: tuple[int, int]) -> DataProblem | None:
    """Look whether what a table's row says of a picture fits it."""
    width, height = size_wh
    if sample.box is not None and not (sample.box[2] <= width + 1 and sample.box[3] <= height + 1):
        box = ",".join(f"{number:g}" for number in sample.box)
        text = f"the box {box} reaches beyond the picture, which has {width}x{height} pixels; mend x0, y0, x1, y1"
        return _problem(sample, "box", text)
    if sample.mask is not None:
        try:
            mask = read_image(root / sample.mask, name=sample.mask)
        except ImageError as error:
            return _problem(sample, "mask", f"the mask {error}; restore it, or leave the cell empty")
        if mask.size != size_wh:
            sizes = f"has {mask.width}x{mask.height} pixels, and the picture {width}x{height}"
            return _problem(sample, "mask", f"the mask {sample.mask} {sizes}; make it as large as the picture")
    return None


def check_dataset(dataset: DataSet, *, workers: int | None = None, progress: Advance | None = None) -> Report:
    """Read and decode every file of the data set and report all that is wrong with it."""

    def judge(sample: Sample) -> tuple[str, DataProblem | None, FileFacts, str | None]:
        examined, look = examine(dataset.root, sample), None
        if examined.image and sample.group is None:
            look = look_of(to_input(examined.image, sample.box, (LOOK_SIDE, LOOK_SIDE))[0])
        return examined.sha256, examined.problem, examined.facts, look

    samples = dataset.all_samples()
    hashes, problems, facts, looks = [], [], [], []
    find_hasher()  # imported here, and not by every process that reads
    with closing(map_many(judge, samples, len(samples), workers)) as found:
        for sha256, problem, told, look in found:
            hashes.append(sha256)
            facts.append(told)
            looks.append(look)
            if problem:
                problems.append(problem)
            if progress:
                progress(len(hashes), len(samples))
    return make_report(dataset, hashes, problems, facts, looks)


def make_report(
    dataset: DataSet,
    hashes: Iterable[str],
    problems: Iterable[DataProblem],
    facts: Sequence[FileFacts],
    looks: Sequence[str | None] | None,
) -> Report:
    """Report on what reading the files of `dataset.all_samples()`, in this order, has found; without `looks`, nothing
    of near-duplicates."""
    samples = dataset.all_samples()
    sha256 = {sample.path: value for sample, value in zip(samples, hashes, strict=True)}
    found = list(problems)
    found += _duplicates(dataset, sha256, {problem.path for problem in found})
    found += _too_few(dataset, {problem.path for problem in found})
    near: tuple[NearDuplicate, ...] = ()
    if wanted := looks is not None and all(sample.group is None for sample in samples):
        known = {sample.path: look for sample, look in zip(samples, looks or (), strict=True) if look is not None}
        near = find_near_duplicates(dataset, known, sha256)
    notes = [
        *tell_values(told.values for told in facts if told.values is not None),
        *_tell_pages(samples, facts),
        *tell_near_duplicates(dataset, near),
        *([MISSING] if wanted and find_hasher() is None else []),
    ]
    return Report(dataset, tuple(found), {path: value for path, value in sha256.items() if value}, tuple(notes), near)


def _tell_pages(samples: Sequence[Sample], facts: Sequence[FileFacts]) -> Iterator[str]:
    """Tell of files of which only the first page is used."""
    used = Counter(sample.path.partition("#page=")[0] for sample in samples)
    several = [s for s, told in zip(samples, facts, strict=True) if told.pages > 1 and used[s.path] == 1]
    if several:
        yield (
            f"{len(several)} files have several pages, of which the first is used, such as {several[0].path}; a table "
            "with a column page names others"
        )


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
            problem = _problem(sample, "duplicate", f"{text}; delete one of them")
            problems.append(replace(problem, is_warning=harmless))
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
        else:
            problems += _too_few_groups(dataset, label)
    return problems


def _too_few_groups(dataset: DataSet, label: int) -> list[DataProblem]:
    """Warn of a class that whole groups could not be held out of."""
    without = [part for part in dataset.held_out if not any(sample.label == label for sample in dataset.part(part))]
    grouped = {sample.group for sample in dataset.train if sample.label == label and sample.group is not None}
    if not without or not grouped:
        return []
    text = f"its pictures are of too few groups to hold any out for {' and '.join(without)}; add pictures of others"
    return [DataProblem(dataset.classes[label], "too few", text, is_warning=True)]
