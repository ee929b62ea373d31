"""Answers on their way into one file: batches in files of frames, one a process and a start, that a kill cannot harm.

A frame is a line with the number of its batch, how many of its pictures could not be read, the number of bytes that
follow and their checksum; and then those bytes. What a
killed process left half written, or a power cut left as zeros, fails its checksum and is worked out again.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PREFIX = "rows-"
MOST_HEAD = 100  # bytes of a frame's first line


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """Where the answers of one batch lie."""

    file: Path
    offset: int
    size: int
    unread: int  # pictures among them that could not be read

    def read(self) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


class FrameWriter:
    """Appends frames to a file of its own. Each reaches the system when it is added, and the disk at the end."""

    def __init__(self, folder: Path, start: int, process: int) -> None:
        self.file = (folder / f"{PREFIX}{start:04}-{process:04}").open("xb")

    def add(self, batch: int, answers: bytes, unread: int) -> None:
        head = f"{batch} {unread} {len(answers)} {zlib.crc32(answers)}\n".encode()
        self.file.write(head + answers)
        self.file.flush()

    def close(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


def frame_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX}*"))


def next_start(folder: Path) -> int:
    """Return a number that no earlier start has."""
    return 1 + max((int(file.name.removeprefix(PREFIX).split("-")[0]) for file in frame_files(folder)), default=0)


def find_frames(files: Iterable[Path]) -> dict[int, AnswerFrame]:
    """Return the whole frames by their batches. Only one is in memory at a time."""
    found: dict[int, AnswerFrame] = {}
    for path in files:
        with path.open("rb") as file:
            while head := file.readline(MOST_HEAD):
                try:
                    batch, unread, size, checksum = map(int, head.split())
                except ValueError:
                    break
                if not head.endswith(b"\n"):
                    break
                offset = file.tell()
                answers = file.read(size)
                if len(answers) < size or zlib.crc32(answers) != checksum:
                    break  # what follows a torn frame was never written
                found[batch] = AnswerFrame(path, offset, size, unread)
    return found
