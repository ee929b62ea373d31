"""Files that anybody may have made: only regular ones are read, up to a size, and JSON fails in one way only."""

import contextlib
import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_BYTES = 1_000_000_000  # of any file that is read into memory: more than the largest picture has
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
}


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[io.BufferedReader]:
    """Open a regular file to read it. Anything else is an OSError: pipes and devices too, which need not end."""
    try:
        # A pipe that nobody writes to would be waited for, were it not for the flag.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:  # a zero byte in the name
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from error
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise OSError(errno.EINVAL, f"it is {KINDS.get(stat.S_IFMT(mode), 'no file')}, not a regular file", str(path))
    with os.fdopen(handle, "rb") as file:
        yield file


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file of at most so many bytes."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= most and len(data := file.read(size + 1)) <= size:
            return data
    raise OSError(errno.EFBIG, f"it is larger than {most / 1e6:,.0f} MB, or grows", str(path))


def digest_file(path: Path, end: bytes = b"") -> str:
    """Return the SHA-256 of a regular file of any size, as if `end` stood at its end."""
    with open_file(path) as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(end)
    return digest.hexdigest()


def parse_json(data: bytes) -> Any:
    """Return the document; whatever is wrong with it is a ValueError."""
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
