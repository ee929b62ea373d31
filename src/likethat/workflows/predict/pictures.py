"""Which pictures a user asks about: files, folders of them, and data sets with lists of their own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from likethat.data.formats import is_benchmark, open_dataset
from likethat.data.pictures import Skipped, find_pictures
from likethat.errors import UserError
from likethat.runs import layout
from likethat.workflows.predict.answers import NamedPicture


def named_pictures(run: Path, sources: Sequence[str]) -> tuple[list[NamedPicture], list[Skipped]]:
    """Return all pictures of files, folders and data sets, each once, those of data sets cropped as the run crops."""
    full_images = layout.read_record(run).config.data.full_images
    found: dict[NamedPicture, None] = {}
    skipped: list[Skipped] = []
    for source in sources:
        if os.path.isdir(source) and is_benchmark(Path(source)):
            dataset = open_dataset(source, full_images=full_images)
            found.update((NamedPicture(str(dataset.root / s.path), s.box), None) for s in dataset.all_samples())
            continue
        paths, others = find_pictures([source])
        found.update((NamedPicture(path), None) for path in paths)
        skipped += others
    if not found:
        raise UserError("Nothing was predicted, since no picture was found; name pictures or folders with pictures.")
    return list(found), skipped


def digest_of(pictures: Sequence[NamedPicture]) -> str:
    """Return a hash of which pictures there are, and in which order."""
    digest = hashlib.sha256()
    for picture in pictures:
        # File names need not be valid Unicode; surrogateescape gives back the bytes they have on disk.
        digest.update(f"{picture.path}\0{picture.box}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
