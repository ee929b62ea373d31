"""One picture of a file that holds several: `stack.tif#page=2` names the second page of a TIFF or DICOM file."""

import hashlib
import os
import re
from pathlib import Path

from likethat.data.files import digest_file, read_file

PAGE = re.compile(r"#page=([1-9][0-9]{0,5})$")


def split_page(path: Path) -> tuple[Path, int]:
    """Return the file and the page, from 1, that a path names. A file of that very name is taken as it is."""
    found = PAGE.search(path.name)
    if found is None or found.start() == 0 or os.path.lexists(path):
        return path, 1
    return path.with_name(path.name[: found.start()]), int(found[1])


def with_page(path: str, page: int) -> str:
    return path if page == 1 else f"{path}#page={page}"


def read_page(path: Path) -> tuple[bytes, int]:
    """Return the content of the file that a path names, and the page."""
    file, page = split_page(path)
    return read_file(file), page


def digest_data(data: bytes, page: int) -> str:
    """Return the SHA-256 by which a picture is known: of its file, with `#page=2` at the end for a further page."""
    return hashlib.sha256(data if page == 1 else data + f"#page={page}".encode()).hexdigest()


def digest_picture(path: Path) -> str:
    """Return the SHA-256 by which the picture that a path names is known; the file may be of any size."""
    file, page = split_page(path)
    return digest_file(file, end=b"" if page == 1 else f"#page={page}".encode())
