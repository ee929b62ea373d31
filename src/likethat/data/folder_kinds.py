"""Folders that likethat made, told from the user's own."""

import os
from pathlib import Path

from likethat.data.files import parse_json, read_file

CONFIG = "config.json"
LOCK = ".lock"  # in a run folder while a process writes into it
CHECKPOINTS, PIXEL_FILE = "checkpoints", "pixels.npy"  # the file lies in the folder
GUIDE_FILE, PARTS_FILE = "species.json", "parts.json"  # of the embedded birds
EXPLANATIONS = ("explanations.html", "explanations.json")
ATLAS = ("index.html", "atlas.json")
AUDIT = ("audit.html", "audit.csv")
TABLE = "table"  # of a study: .md, .json and .svg
STUDY = (f"{TABLE}.md", f"{TABLE}.json")


def is_run(folder: Path) -> bool:
    """Return whether config.json in the folder is a run's; many other programs write files of that name."""
    try:
        document = parse_json(read_file(folder / CONFIG))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and isinstance(document.get("format"), int) and "likethat" in document


def is_begun(folder: Path) -> bool:
    """Return whether the folder holds only cached pixels and a lock, as a run does while it reads images."""
    has_cache = (folder / CHECKPOINTS).is_dir()
    if not (has_cache or (folder / LOCK).is_file()) or set(os.listdir(folder)) - {CHECKPOINTS, LOCK}:
        return False
    return not has_cache or all(name.startswith((PIXEL_FILE, ".")) for name in os.listdir(folder / CHECKPOINTS))


def is_birds(folder: Path) -> bool:
    """Return whether `likethat data synth` made the folder."""
    return _has(folder, (GUIDE_FILE, PARTS_FILE))


def is_explanations(folder: Path) -> bool:
    return _has(folder, EXPLANATIONS)


def is_atlas(folder: Path) -> bool:
    return _has(folder, ATLAS)


def is_audit(folder: Path) -> bool:
    return _has(folder, AUDIT)


def made_by_likethat(folder: Path) -> bool:
    """Return whether likethat made the folder: a run, begun or finished, explanations, an atlas, an audit or a
    study."""
    kinds = (EXPLANATIONS, ATLAS, AUDIT, STUDY)
    return is_run(folder) or is_begun(folder) or any(_has(folder, names) for names in kinds)


def _has(folder: Path, names: tuple[str, ...]) -> bool:
    return all((folder / name).is_file() for name in names)
