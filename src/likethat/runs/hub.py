"""A model to give away: its run folder in the layout of the Hugging Face hub, and the way back."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from likethat.data.folder_kinds import is_run
from likethat.errors import UserError
from likethat.runs import layout
from likethat.runs.atomic_files import copy_state, load_tensors, read_json, whole_folder, write_json, write_text
from likethat.runs.manifest import write_manifest
from likethat.runs.model_card import write_card

# What a model needs and what tells about it. Checkpoints, pages and the history with people's names stay at home.
FILES = (layout.MODEL, layout.PROTOTYPES)
DOCUMENTS = (layout.CONFIG, layout.CALIBRATION, *layout.INTERPRETABILITY.values())
WANTED = ["*.json", "*.jsonl", "*.safetensors", "*.md", "*.jpg"]  # of a repository; nothing else is ever read


def save_pretrained(run: Path, networks: Iterable[nn.Module], folder: Path, *, overwrite: bool = False) -> Path:
    """Write config.json, model.safetensors, a model card, and what explanations need: a run that any verb takes."""
    if folder.resolve().is_relative_to(run.resolve()) or run.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{folder} and the run {run} lie in one another; choose another folder.")
    _check_unchanged(run, networks)
    with whole_folder(folder, is_run, overwrite=overwrite) as target:
        for part in {".", *layout.read_record(run).member_folders()}:
            _copy(run / part, target / part)
        write_card(target)
        for part in {".", *layout.read_record(run).member_folders()}:
            write_manifest(target / part)
    return folder


def _check_unchanged(run: Path, networks: Iterable[nn.Module]) -> None:
    """Check that the model in memory is the one in the run's file, which is what is written."""
    folders = layout.read_record(run).member_folders()
    for network, part in zip(networks, folders, strict=True):
        saved, _ = load_tensors(run / part / layout.MODEL)
        now = copy_state(network)
        if saved.keys() != now.keys() or not all(torch.equal(saved[name], value) for name, value in now.items()):
            raise UserError(f"The model was changed since {run} was loaded; save it as a run of its own first.")


def _copy(run: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in DOCUMENTS:
        if (run / name).is_file():
            write_json(target / name, _without_places(read_json(run / name)))
    lines = [json.dumps(_without_places(line)) for line in layout.read_metrics(run)]
    write_text(target / layout.METRICS, "".join(f"{line}\n" for line in lines))
    try:
        for name in FILES:
            if (run / name).is_file():
                shutil.copyfile(run / name, target / name)
        if (run / layout.PICTURES).is_dir():
            shutil.copytree(run / layout.PICTURES, target / layout.PICTURES)
    except (OSError, shutil.Error) as error:
        raise UserError(f"{run} could not be copied ({error}); restore it or make room.") from error


def _without_places(value: Any) -> Any:
    """Replace absolute paths by the names at their ends: where things lie on one machine is nobody else's business."""
    if isinstance(value, dict):
        return {key: _without_places(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_places(entry) for entry in value]
    return PurePath(value).name if isinstance(value, str) and PurePath(value).is_absolute() else value


def find_pretrained(source: str | Path) -> Path:
    """Return the run folder that `source` is, or that a repository of the hub holds (needs huggingface_hub)."""
    if Path(source).is_dir():
        return Path(source)
    if not isinstance(source, str) or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise UserError(f"There is no folder {source}; name one, or a repository of the hub as in 'ada/birds'.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UserError(f"{source} is no folder, and the hub needs `pip install huggingface_hub`.") from error
    try:
        folder = snapshot_download(source, allow_patterns=WANTED)
    except Exception as error:  # the hub's client raises many kinds; each means that there is no such model to be had
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{source} is no folder, and the hub does not give it ({reason}); check the name.") from error
    return Path(folder)
