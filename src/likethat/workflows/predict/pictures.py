"""Which pictures a user asks about: files, folders of them, tables, and data sets with lists of their own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from likethat.data.formats import is_benchmark, open_by_config
from likethat.data.pictures import Skipped, find_pictures
from likethat.data.tables.rows import is_table
from likethat.data.tables.table import list_pictures
from likethat.errors import UserError
from likethat.runs import layout
from likethat.workflows.predict.reading import NamedPicture


def named_pictures(run: Path, sources: Sequence[str]) -> tuple[list[NamedPicture], list[Skipped]]:
    """Return all pictures of files, folders, tables and data sets, each once, cropped to the boxes that they come with
    where the run crops."""
    config = layout.read_record(run).config
    found: dict[NamedPicture, None] = {}
    skipped: list[Skipped] = []
    for source in sources:
        if is_table(Path(source)):
            listed = list_pictures(Path(source), config.data.columns, config.data.images, strict=False)
            boxed = not config.data.full_images
            found.update((NamedPicture(str(path), box if boxed else None), None) for path, box in listed)
            continue
        if os.path.isdir(source) and is_benchmark(Path(source)):
            dataset = open_by_config(source, config)
            found.update((NamedPicture(str(dataset.root / s.path), s.box), None) for s in dataset.all_samples())
            continue
        paths, others = find_pictures([source])
        found.update((NamedPicture(path), None) for path in paths)
        skipped += others
    if not found:
        raise UserError("Nothing was predicted, since no picture was found; name pictures, folders or tables of them.")
    return list(found), skipped


def digest_of(pictures: Sequence[NamedPicture]) -> str:
    """Return a hash of which pictures there are, and in which order."""
    digest = hashlib.sha256()
    for picture in pictures:
        # File names need not be valid Unicode; surrogateescape gives back the bytes they have on disk.
        digest.update(f"{picture.path}\0{picture.box}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
