"""Folders that likethat made, told from the user's own."""

import json
import os
from pathlib import Path

CONFIG = "config.json"
CHECKPOINTS, PIXEL_FILE = "checkpoints", "pixels.npy"  # the file lies in the folder
GUIDE_FILE, PARTS_FILE = "species.json", "parts.json"  # of the embedded birds
EXPLANATIONS = ("explanations.html", "explanations.json")
ATLAS = ("index.html", "atlas.json")
TABLE = "table"  # of a study: .md, .json and .svg
STUDY = (f"{TABLE}.md", f"{TABLE}.json")


def is_run(folder: Path) -> bool:
    """Return whether config.json in the folder is a run's; many other programs write files of that name."""
    try:
        document = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and isinstance(document.get("format"), int) and "likethat" in document


def is_begun(folder: Path) -> bool:
    """Return whether the folder holds only cached pixels, as a run does that was stopped while it read images."""
    if not (folder / CHECKPOINTS).is_dir() or len(os.listdir(folder)) > 1:
        return False
    return all(name.startswith((PIXEL_FILE, ".")) for name in os.listdir(folder / CHECKPOINTS))


def is_birds(folder: Path) -> bool:
    """Return whether `likethat data synth` made the folder."""
    return _has(folder, (GUIDE_FILE, PARTS_FILE))


def is_explanations(folder: Path) -> bool:
    return _has(folder, EXPLANATIONS)


def is_atlas(folder: Path) -> bool:
    return _has(folder, ATLAS)


def made_by_likethat(folder: Path) -> bool:
    """Return whether likethat made the folder: a run, begun or finished, explanations, an atlas or a study."""
    return is_run(folder) or is_begun(folder) or any(_has(folder, names) for names in (EXPLANATIONS, ATLAS, STUDY))


def _has(folder: Path, names: tuple[str, ...]) -> bool:
    return all((folder / name).is_file() for name in names)
