"""Image folders: train/CLASS/*, val/CLASS/*, test/CLASS/*, or CLASS/* alone."""

import os
from collections.abc import Iterator
from pathlib import Path

from likethat.data.dataset import DataSet, Sample, hold_out
from likethat.data.folder_kinds import made_by_likethat
from likethat.errors import UserError

EXTENSIONS = frozenset(
    ".jpg .jpeg .jpe .jfif .png .apng .webp .gif .bmp .tif .tiff .avif .heic .heif .dcm .dicom".split()
)
PART_NAMES = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


def open_folder(root: Path, *, seed: int, val_fraction: float, test_fraction: float) -> DataSet:
    """Open the image folder at `root`; val and test are held out of train, class by class, where they are missing."""
    folders = _part_folders(root)
    train_folder = folders.get("train", root)
    if train_folder == root and folders:
        names = ", ".join(folder.name for folder in folders.values())
        raise UserError(f"{root} has {names} but no train folder: name the folder of the training images 'train'")

    train_files = _files_by_class(train_folder)
    _check_classes(train_folder, train_files)
    classes = tuple(sorted(train_files))
    train = _samples(root, train_folder, train_files, classes)
    given = {}
    for part in ("val", "test"):
        files = _files_by_class(folders[part]) if part in folders else {}
        files = {name: paths for name, paths in files.items() if paths}
        if unknown := sorted(set(files) - set(classes)):
            raise UserError(
                f"{folders[part]} has classes that {train_folder} has not: {', '.join(unknown)}; "
                "add training images for them or remove them"
            )
        if files:
            given[part] = _samples(root, folders[part], files, classes)

    fractions = {"test": test_fraction, "val": val_fraction}
    held_out = tuple(part for part in fractions if part not in given)
    train, *taken = hold_out(train, classes, [fractions[part] for part in held_out], seed=seed)
    parts = given | dict(zip(held_out, taken, strict=True))
    return DataSet(root, "folder", classes, train, parts["val"], parts["test"], held_out)


def _part_folders(root: Path) -> dict[str, Path]:
    """Return the folders named like a part, or none where they are classes: vehicles may have a class 'train'."""
    folders = _class_folders(root)
    found: dict[str, Path] = {}
    for part, names in PART_NAMES.items():
        matches = [folder for folder in folders if folder.lower() in names]
        if len(matches) > 1:
            raise UserError(f"{root} has both {' and '.join(matches)}: keep one of them")
        if matches:
            found[part] = root / matches[0]
    holds_classes = "train" in found and len(_class_folders(found["train"])) > 0
    return found if holds_classes or len(found) == len(folders) else {}


def _class_folders(folder: Path) -> list[str]:
    """Return the folders in `folder`, except hidden ones and those that likethat made, such as runs."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry)]
    return sorted(name for name in names if not made_by_likethat(folder / name))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Also of links: one that leads to itself leads to no folder."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _files_by_class(folder: Path) -> dict[str, list[str]]:
    """Return, by class name, the sorted paths of its image files relative to the class's folder."""
    files = {}
    for name in _class_folders(folder):
        start = os.path.join(folder, name)
        paths = sorted(_image_files(start, "", (os.path.realpath(start),)))
        if paths or not any(made_by_likethat(Path(inside)) for inside, _, _ in os.walk(start)):  # not for runs alone
            files[name] = paths
    return files


def _image_files(start: str, inside: str, parents: tuple[str, ...]) -> Iterator[str]:
    """Yield files with an image's extension below `start`, at any depth; `parents` guards against circular links."""
    with os.scandir(os.path.join(start, inside)) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = f"{inside}/{entry.name}" if inside else entry.name
            if _is_folder(entry):
                real_path = os.path.realpath(entry.path)
                if real_path not in parents and not made_by_likethat(Path(entry.path)):
                    yield from _image_files(start, path, (*parents, real_path))
            elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:
                yield path


def _samples(root: Path, folder: Path, files: dict[str, list[str]], classes: tuple[str, ...]) -> tuple[Sample, ...]:
    prefix = "" if folder == root else f"{folder.name}/"
    label_of = {name: label for label, name in enumerate(classes)}
    return tuple(Sample(f"{prefix}{name}/{path}", label_of[name]) for name in sorted(files) for path in files[name])


def _check_classes(folder: Path, files: dict[str, list[str]]) -> None:
    if not any(files.values()):
        raise UserError(
            f"{folder} has no images in class folders: make one folder per class in it and put the class's images "
            f"({', '.join(sorted(EXTENSIONS))}) there"
        )
    if len(files) == 1:
        (only,) = files
        remedy = "make one folder per class"
        if len(_class_folders(folder / only)) > 1:
            remedy = f"did you mean {folder / only}?"
        raise UserError(f"{folder} has a single class, {only}, and a classifier needs two or more: {remedy}")
