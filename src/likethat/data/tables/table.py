"""Opens a data set that a table lists; what is wrong with a row is told with its number."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from likethat.data.dataset import PARTS, DataSet, Sample, hold_out
from likethat.data.groups import hold_out_groups
from likethat.data.reading.pages import split_page, with_page
from likethat.data.reading.values import Range
from likethat.data.tables.columns import BOX, COLUMNS, find_columns, parse_columns
from likethat.data.tables.rows import Table, is_table, read_table
from likethat.data.tables.values import (
    BadValue,
    are_plain,
    read_box,
    read_label,
    read_page,
    read_part,
    read_path,
    read_weight,
)
from likethat.errors import UserError

NEEDED = object()  # in place of what a value is where it is empty
READERS: dict[str, tuple[Callable[[Any], object], object]] = {
    "path": (read_path, NEEDED),
    "label": (read_label, NEEDED),
    "split": (read_part, NEEDED),
    "box": (read_box, None),
    "group": (str.strip, None),
    "mask": (read_path, None),
    "weight": (read_weight, 1.0),
    "page": (read_page, 1),
}
SHOWN, KEPT = 3, 1000  # bad rows in a sentence, and of a kind in memory
LOOKED_AT = 100  # rows whose files are looked for at once: where all are missing, the paths mean something else


class Problems:
    """Bad rows: the first of them are shown, all are counted."""

    def __init__(self, table: Path) -> None:
        self.table, self.count, self.kept = table, 0, list[tuple[int, str]]()

    def add(self, rows: Sequence[tuple[int, str]]) -> None:
        self.count += len(rows)
        self.kept += rows[:KEPT]

    def refuse(self) -> None:
        if self.count:
            shown = "; ".join(f"row {row}: {text}" for row, text in sorted(self.kept)[:SHOWN])
            more = f" (and {self.count - SHOWN} more rows)" if self.count > SHOWN else ""
            raise UserError(f"{self.table}, {shown}{more}.")


def find_table(path: Path) -> Path | None:
    return path if is_table(path) else None


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep Python from looking for garbage among millions of new objects, which would take a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_garbage_collection()
def open_table(
    table: Path,
    *,
    seed: int,
    full_images: bool,
    val_fraction: float,
    test_fraction: float,
    columns: str = "",
    images: str = "",
    value_range: Range | None = None,
    strict: bool = True,
) -> DataSet:
    """Open the data set that the table lists. Where it has no column `split`, or no row of a part, pictures of the part
    are held out: whole groups where it has a column `group`."""
    base = _images_folder(table, images)
    read = _read(table, columns, strict, COLUMNS)
    root, paths, masks = _relative_to_root(table, base, read)
    labels, splits = read.columns["label"], read.columns["split"]
    classes = _classes(table, read.rows, labels, splits)
    number_of = {name: label for label, name in enumerate(classes)}
    others = (read.columns[name] for name in ("box", "group", "weight"))
    parts: dict[str, list[Sample]] = {"train": []}
    for row, path, mask, label, part, box, group, weight in zip(
        read.rows, paths, masks, labels, splits, *others, strict=True
    ):
        crop, object_box = (None, box) if full_images else (box, None)
        sample = Sample(path, number_of[label], crop, group, mask, weight, row, value_range, object_box)
        parts.setdefault(part, []).append(sample)
    fractions = {"test": test_fraction, "val": val_fraction}
    held_out = tuple(part for part in fractions if part not in parts)
    wanted = [fractions[part] for part in held_out]
    if any(group is not None for group in read.columns["group"]):
        _check_groups(table, parts)
        kept, *taken = hold_out_groups(parts["train"], wanted, seed=seed)
    else:
        kept, *taken = hold_out(parts["train"], classes, wanted, seed=seed)
    whole: Mapping[str, Sequence[Sample]] = parts | dict(zip(held_out, taken, strict=True)) | {"train": kept}
    train, val, test = (tuple(sorted(whole[part], key=attrgetter("label", "path"))) for part in PARTS)
    return DataSet(root, "table", classes, train, val, test, held_out, table)


def list_pictures(
    table: Path, columns: str = "", images: str = "", *, strict: bool = True
) -> list[tuple[Path, tuple[float, float, float, float] | None]]:
    """Return the pictures that a table lists, in its order, and their boxes; it need not have labels."""
    base, read = _images_folder(table, images), _read(table, columns, strict, ("path", "page", *BOX))
    return [(base / path, box) for path, box in zip(read.columns["path"], read.columns["box"], strict=True)]


def _images_folder(table: Path, images: str) -> Path:
    """Return the folder that the table's paths are relative to."""
    folder = Path(os.path.normpath(table.parent / Path(images).expanduser()))
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}, where --images says that the pictures of {table} lie.")
    return folder


def _read(table: Path, columns: str, strict: bool, wanted: Sequence[str]) -> Table:
    """Read the wanted columns of the table as what they mean; boxes are one column, and pages belong to paths."""
    named = parse_columns(columns)
    texts = read_table(table, lambda header: find_columns(header, named, str(table), strict=strict, wanted=wanted))
    if not texts.rows:
        raise UserError(f"{table} has no rows below its header; add a row for every picture.")
    problems, rows, found = Problems(table), texts.rows, dict[str, list[Any]]()
    if "x0" in texts.columns:
        texts.columns["box"] = list(zip(*(texts.columns[name] for name in BOX), strict=True))
    for name, (read, usual) in READERS.items():
        if name not in texts.columns:
            found[name] = ["train" if name == "split" else usual] * len(rows)
        elif name == "path" and are_plain(texts.columns[name]):
            found[name] = texts.columns[name]
        else:
            found[name] = _read_column(texts.columns[name], read, usual, rows, problems)
    problems.refuse()
    if "page" in texts.columns:
        found["path"] = [with_page(path, page) for path, page in zip(found["path"], found["page"], strict=True)]
    return Table(rows, found)


def _read_column(
    texts: Sequence[Any], read: Callable[[Any], object], usual: object, rows: Sequence[int], problems: Problems
) -> list[Any]:
    """Read every different text once: a million rows have few different labels."""
    values: dict[str | tuple[str, ...], object] = {}
    bad: dict[str | tuple[str, ...], str] = {}
    for text in set(texts):
        is_empty = not "".join(text).strip()
        try:
            values[text] = usual if is_empty and usual is not NEEDED else read(text)
        except BadValue as error:
            bad[text] = str(error)
    if bad:
        problems.add([(row, bad[text]) for row, text in zip(rows, texts, strict=True) if text in bad])
    return [values.get(text) for text in texts]


def _relative_to_root(table: Path, base: Path, read: Table) -> tuple[Path, list[str], list[str | None]]:
    """Return the folder that holds all pictures, and paths and masks relative to it: the table's folder, unless rows
    name pictures outside it."""
    paths: list[str] = read.columns["path"]
    if not any(split_page(base / path)[0].exists() for path in paths[:LOOKED_AT]):
        raise UserError(
            f"{table}, row {read.rows[0]}: there is no file {base / paths[0]}, nor any that the next rows name. Paths "
            "are relative to the table; say with --images FOLDER where the pictures lie."
        )
    masks: list[str | None] = read.columns["mask"]
    root, odd = base, ("./", "//", "\n/", ":")  # what paths may have that are not simply names of files below the base
    together = "\n".join(["", *paths, *filter(None, masks)])
    if any(mark in together for mark in odd):
        paths = [os.path.normpath(base / path) for path in paths]
        masks = [mask and os.path.normpath(base / mask) for mask in masks]
        try:
            root = Path(os.path.commonpath([base, *{os.path.dirname(path) for path in (*paths, *filter(None, masks))}]))
        except ValueError as error:
            raise UserError("The pictures of a table must lie on one drive; copy them there.") from error
        paths = [Path(path).relative_to(root).as_posix() for path in paths]
        masks = [mask and Path(mask).relative_to(root).as_posix() for mask in masks]
    if len(set(paths)) < len(paths):
        _refuse_twice(table, read.rows, paths)
    return root, paths, masks


def _refuse_twice(table: Path, rows: Sequence[int], paths: Sequence[str]) -> None:
    row_of: dict[str, int] = {}
    problems = Problems(table)
    for row, path in zip(rows, paths, strict=True):
        if (first := row_of.setdefault(path, row)) != row:
            problems.add([(row, f"{path} is the picture of row {first} too; keep one of them")])
    problems.refuse()


def _classes(table: Path, rows: Sequence[int], labels: Sequence[str], splits: Sequence[str]) -> tuple[str, ...]:
    """Return the labels of the training pictures; others must not have any that these lack."""
    pairs = set(zip(labels, splits, strict=True))
    classes = {label for label, part in pairs if part == "train"}
    if not classes:
        raise UserError(f"{table} has no row whose split is train; add training pictures, or remove the column.")
    problems = Problems(table)
    if unknown := {label for label, _ in pairs} - classes:
        problems.add(
            [
                (row, f"'{label}' is a label of {part} that no training picture has; add some, or remove it")
                for row, label, part in zip(rows, labels, splits, strict=True)
                if label in unknown
            ]
        )
    problems.refuse()
    if len(classes) == 1:
        raise UserError(f"{table} has a single label, '{classes.pop()}', and a classifier needs two or more.")
    return tuple(sorted(classes))


def _check_groups(table: Path, parts: Mapping[str, Sequence[Sample]]) -> None:
    """Refuse a split that tears groups apart. Their names may be those of patients, and are not told."""
    first_of: dict[str, tuple[str, int | None]] = {}
    problems = Problems(table)
    for part, samples in parts.items() if len(parts) > 1 else ():
        for sample in samples:
            if sample.group is None:
                continue
            first_part, row = first_of.setdefault(sample.group, (part, sample.row))
            if first_part != part:
                text = f"the picture is in {part}, and that of row {row}, of the same group, in {first_part}"
                remedy = "give a group one split, or remove the column split"
                problems.add([(sample.row or 0, f"{text}; {remedy}")])
    problems.refuse()
