"""Predicts and explains picture files, many after one another, and writes what was found into a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from likethat.data.decode import Box, ImageError
from likethat.data.folder_kinds import EXPLANATIONS
from likethat.data.pictures import Skipped
from likethat.data.reading.workers import map_in_threads
from likethat.explaining.attribution import UPSAMPLING
from likethat.explaining.draw.render import shrink
from likethat.explaining.explanation import USUAL, Explanation, Options, explain_batch
from likethat.explaining.hiding import hide_boxes
from likethat.progress import Advance
from likethat.runs.classifier import Classifier, Prediction, PreparedPicture

PAGE, DATA = EXPLANATIONS
BATCH = 16
KEPT_SIDE = 640  # pixels kept of an explained picture, more than pages and sheets show


def predict_files(
    classifier: Classifier, paths: Sequence[str], level: float | None = None
) -> Iterator[Prediction | Skipped]:
    """Yield one answer a file, in order."""
    for start in range(0, len(paths), BATCH):
        read_B = _read(classifier, paths[start : start + BATCH])
        good = [found for found in read_B if isinstance(found, PreparedPicture)]
        predicted = classifier.predict_batch(good, level) if good else iter(())
        for found in read_B:
            yield found if isinstance(found, Skipped) else next(predicted)


def explain_files(
    classifier: Classifier,
    paths: Sequence[str],
    options: Options = USUAL,
    advance: Advance | None = None,
    *,
    hide: Sequence[Box] = (),
) -> Iterator[Explanation | Skipped]:
    """Yield one answer a file, in order. Files are read and explained in batches; few are in memory at any time. The
    rectangles of `hide` are painted over in each."""
    step = BATCH if options.attribution == UPSAMPLING else 1  # slow ones show their progress picture by picture
    for start in range(0, len(paths), step):
        names = paths[start : start + step]
        read_B = _read(classifier, names, hide)
        good = {name: read for name, read in zip(names, read_B, strict=True) if isinstance(read, PreparedPicture)}
        explained: Iterator[Explanation] = iter(())
        if good:
            explained = iter(explain_batch(classifier, list(good.values()), options, paths=list(good)))
        for answer in read_B:
            if isinstance(answer, Skipped):
                yield answer
                continue
            explanation = next(explained)
            yield explanation.with_picture(shrink(explanation.picture, KEPT_SIDE))
        if advance:
            advance(start + len(names), len(paths))


def _read(classifier: Classifier, paths: Sequence[str], hide: Sequence[Box] = ()) -> list[PreparedPicture | Skipped]:
    def read(path: str) -> PreparedPicture | Skipped:
        try:
            return hide_boxes(classifier.prepare(path), hide)
        except ImageError as error:
            return Skipped(path, error.cause)

    return list(map_in_threads(read, paths))


def sheet_names(paths: Sequence[str], ending: str = ".png") -> dict[str, str]:
    """Return a file name for the sheet of every picture: the picture's, with its folder's where several are alike."""
    alike = Counter(Path(path).stem.lower() for path in paths)
    names: dict[str, str] = {}
    taken = {""}  # lower case: some file systems know only one of Owl.png and owl.png
    for path in paths:
        own, folder = Path(path).stem, Path(path).resolve().parent.name
        stem = own if alike[own.lower()] == 1 else f"{folder}-{own}"
        name, copy = stem, 1
        while name.lower() in taken:
            copy += 1
            name = f"{stem}-{copy}"
        taken.add(name.lower())
        names[path] = f"{name}{ending}"
    return names


def save_sheets(
    folder: Path, answers: Iterable[Explanation | Skipped], names: Mapping[str, str], colours: str, *, long: bool
) -> Iterator[Explanation | Skipped]:
    """Pass answers on once their sheets are drawn: in threads, while the network is at the next ones."""

    def save(answer: Explanation | Skipped) -> Explanation | Skipped:
        if isinstance(answer, Explanation) and answer.path:
            answer.save(folder / names[answer.path], colours, long=long)
        return answer

    return map_in_threads(save, answers)
