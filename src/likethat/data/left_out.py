"""What lies in an image folder and is not used: pictures outside classes, in hidden folders, or of unknown formats."""

import os
from collections.abc import Iterator
from pathlib import Path

from likethat.data.check import DataProblem
from likethat.data.dataset import DataSet
from likethat.data.decode import READABLE
from likethat.data.folder import EXTENSIONS
from likethat.data.folder_kinds import GUIDE_FILE, PARTS_FILE, made_by_likethat

OF_SYSTEMS = frozenset({"thumbs.db", "desktop.ini", GUIDE_FILE, PARTS_FILE})  # nobody misses them


def find_left_out(dataset: DataSet) -> Iterator[DataProblem]:
    """Yield a warning for everything of one kind; it names the first."""
    if dataset.kind != "folder":  # others have lists of their images
        return
    above_classes = {"."} | {
        sample.path.partition(f"{dataset.classes[sample.label]}/")[0].rstrip("/") for sample in dataset.all_samples()
    }
    loose: list[str] = []
    unknown: dict[str, list[str]] = {}  # by ending
    for folder, inside, names in os.walk(dataset.root):
        place = Path(folder).relative_to(dataset.root)
        for name in sorted(inside):
            if name.startswith(".") and (count := _pictures_in(os.path.join(folder, name))):
                pictures = "1 picture in it is" if count == 1 else f"{count} pictures in it are"
                text = f"hidden by the dot in its name, so {pictures} left out; rename the folder to use what is in it"
                yield _left_out((place / name).as_posix(), text)
        inside[:] = [name for name in inside if not name.startswith(".") and not made_by_likethat(Path(folder, name))]
        for name in sorted(names):
            path, ending = (place / name).as_posix(), Path(name).suffix.lower()
            if name.startswith(".") or name.lower() in OF_SYSTEMS:
                continue
            if ending not in EXTENSIONS:
                unknown.setdefault(ending, []).append(path)
            elif place.as_posix() in above_classes:
                loose.append(path)
    if loose:
        where = "it into its" if len(loose) == 1 else "them into their"
        text = f"{_counted(loose, 'picture')} outside class folders left out; move {where} class's folder"
        yield _left_out(loose[0], text)
    for ending, paths in sorted(unknown.items()):
        what = f"{_counted(paths, 'file')} {f'ending in {ending}' if ending else 'without an ending'} left out"
        yield _left_out(paths[0], f"{what}; pictures must be {READABLE} to be used")


def _left_out(path: str, text: str) -> DataProblem:
    return DataProblem(path, "left out", text, is_warning=True)


def _counted(paths: list[str], what: str) -> str:
    return f"{len(paths)} {what}{'s' * (len(paths) > 1)}"


def _pictures_in(folder: str) -> int:
    return sum(Path(name).suffix.lower() in EXTENSIONS for _, _, names in os.walk(folder) for name in names)
