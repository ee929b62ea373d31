"""What `likethat predict --out` does: any number of pictures, answered batch by batch into one file.

Batches are cut the same way every time, and their answers wait in a folder beside the file until all are there. So a
call that was stopped or killed is gone on with by the next one, with any number of processes, and ends in the same
bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from likethat.data.files import digest_file
from likethat.data.pictures import Skipped
from likethat.distributed import any_process, barrier, broadcast_object, is_main_process, own_shard, rank
from likethat.errors import UserError
from likethat.progress import Display
from likethat.runs import layout
from likethat.runs.atomic_files import atomic_path, read_json, write_json
from likethat.runs.classifier import Classifier, load
from likethat.runs.lock import lock_run
from likethat.runtime import StopFlag, stop_on_signals
from likethat.workflows.predict.answers import Found, find_answers, rows_of
from likethat.workflows.predict.formats import AnswerFormat, Row, format_of
from likethat.workflows.predict.frames import FrameWriter, find_frames, frame_files, next_start
from likethat.workflows.predict.pictures import digest_of, named_pictures
from likethat.workflows.predict.reading import NamedPicture, ReadBatch, read_batches

BATCH = 64
HEADER = "begun.json"  # what must be the same for answers to mean the same
VERSION = 1


@dataclass(frozen=True)
class AnsweredFile:
    out: Path
    pictures: int
    known: int  # answered by an earlier call
    unread: int  # pictures among them that could not be read
    skipped: tuple[Skipped, ...]

    def to_dict(self) -> dict[str, Any]:
        head = {"out": str(self.out), "pictures": self.pictures, "known": self.known, "unread": self.unread}
        return {**head, "skipped": [vars(entry) for entry in self.skipped]}


def predict_to_file(
    run: Path,
    sources: Sequence[str],
    out: Path,
    *,
    level: float | None = None,
    device: str = "auto",
    overwrite: bool = False,
    display: Display,
) -> AnsweredFile:
    """Answer about all pictures of `sources` in the file `out`."""
    answers, part = format_of(out), out.with_name(f"{out.name}.part")
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file that ends in .csv, .jsonl or .parquet.")
    if out.exists() and not overwrite:
        raise UserError(f"{out} is there already; pass --overwrite to replace it, or another --out.")
    classifier = load(run, device)
    # Of no pictures yet: a level that cannot be promised is told before anything is written.
    classifier.verdicts(torch.zeros(0, len(classifier.classes)), torch.zeros(0, len(classifier.prototypes)), level)
    pictures, skipped = named_pictures(run, sources)
    header = {**_header(classifier, pictures, level), "ending": out.suffix.lower()}
    if any_process(header != broadcast_object(header)):
        raise UserError("Not every process sees the same run and pictures; name folders that all machines share.")
    batches = -(-len(pictures) // BATCH)
    with lock_run(part), stop_on_signals() as stop:
        barrier()  # nobody looks before the folder is there
        wanted = broadcast_object(_open_part(part, header, batches, overwrite=overwrite) if is_main_process() else [])
        if wanted is None:
            raise UserError(
                f"{part} was begun with another run, other pictures or another --level; pass --overwrite to begin "
                "anew, or another --out."
            )
        known = len(pictures) - sum(len(_cut(pictures, number)) for number in wanted)
        if known:
            display.line(f"going on: {known} of {len(pictures)} pictures are answered already")
        _answer_own(classifier, pictures, wanted, part, answers, level, display, stop)
        barrier()
        unread = broadcast_object(_write_together(out, part, answers, batches) if is_main_process() else 0)
    if is_main_process():
        shutil.rmtree(part, ignore_errors=True)
    barrier()
    return AnsweredFile(out, len(pictures), known, unread, tuple(skipped))


def _cut(pictures: Sequence[NamedPicture], batch: int) -> Sequence[NamedPicture]:
    return pictures[batch * BATCH : (batch + 1) * BATCH]


def _header(classifier: Classifier, pictures: Sequence[NamedPicture], level: float | None) -> dict[str, Any]:
    folders = [".", *layout.read_record(classifier.path).member_folders()]
    names = (layout.CONFIG, layout.MODEL, layout.PROTOTYPES, layout.CALIBRATION)
    files = [f"{folder}/{name}" for folder in dict.fromkeys(folders) for name in names]
    digests = {name: digest_file(classifier.path / name) for name in files if (classifier.path / name).is_file()}
    return {
        "version": VERSION,
        "run": digests,
        "pictures": digest_of(pictures),
        "count": len(pictures),
        "batch": BATCH,
        "level": level,
    }


def _open_part(part: Path, header: dict[str, Any], batches: int, *, overwrite: bool) -> list[int] | None:
    """Return the batches that are still to be answered; None where the folder is of another question and may not be
    begun anew."""
    file = part / HEADER
    if file.is_file() and read_json(file) != header:
        if not overwrite:
            return None
        for path in frame_files(part):
            path.unlink()
    write_json(file, header)
    done = find_frames(frame_files(part))
    return [number for number in range(batches) if number not in done]


def _answer_own(
    classifier: Classifier,
    pictures: Sequence[NamedPicture],
    wanted: Sequence[int],
    part: Path,
    answers: AnswerFormat,
    level: float | None,
    display: Display,
    stop: StopFlag,
) -> None:
    """Answer this process's share of the batches. While the device is at one, the answers of the one before are
    written, and the ones after are read."""
    start = broadcast_object(next_start(part) if is_main_process() else 0)
    own = wanted[own_shard(len(wanted))]
    total, done = sum(len(_cut(pictures, number)) for number in own), 0
    writer = FrameWriter(part, start, rank())
    try:
        with display.task("predicting") as advance, closing(read_batches(classifier, pictures, own, BATCH)) as batches:
            for number, rows in zip(own, _answered(classifier, batches, level), strict=True):
                writer.add(number, answers.encode(rows), sum(row["error"] is not None for row in rows))
                done += len(rows)
                advance(done, total)
                stop.check()
    finally:
        writer.close()


def _answered(classifier: Classifier, batches: Iterable[ReadBatch], level: float | None) -> Iterator[list[Row]]:
    """Yield the rows of each batch when the device has been given the one after it."""
    waiting: Callable[[], list[Row]] | None = None
    for batch in batches:
        arriving = find_answers(classifier, batch.pixels) if batch.views else None
        if waiting:
            yield waiting()
        waiting = partial(_rows, classifier, batch, arriving, level)
    if waiting:
        yield waiting()


def _rows(
    classifier: Classifier, batch: ReadBatch, arriving: Callable[[], Found] | None, level: float | None
) -> list[Row]:
    return rows_of(classifier, batch, arriving() if arriving else None, level)


def _write_together(out: Path, part: Path, answers: AnswerFormat, batches: int) -> int:
    """Put all answers into the file, in the order of the pictures; return how many of these could not be read."""
    frames = find_frames(frame_files(part))
    if missing := [number for number in range(batches) if number not in frames]:
        raise UserError(f"{len(missing)} batches of answers in {part} are damaged; start the same command again.")
    with atomic_path(out) as temporary:
        answers.write(temporary, (frames[number].read() for number in range(batches)))
    return sum(frame.unread for frame in frames.values())
