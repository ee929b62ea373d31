"""The options of training: a flag for every field of the configuration, for each verb that trains."""

from __future__ import annotations

import argparse
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from likethat.cli.arguments import display_of
from likethat.config import presets, settings

# By an option's name, or by its kind.
METAVARS = {
    "windows": "SIZE,STRIDE",
    int: "N",
    float: "X",
    tuple[int, int]: "H,W",
    tuple[float, float]: "LOW,HIGH",
    tuple[int, ...]: "N,...",
}


def add_training_arguments(verb: argparse.ArgumentParser) -> None:
    add_data(verb)
    verb.add_argument("--out", type=Path, required=True, metavar="RUN", help="run folder to make")
    verb.add_argument("--preset", default="default", help=f"one of {', '.join(presets.PRESETS)} (default: default)")
    verb.add_argument("--config", type=Path, metavar="FILE", help="TOML file with any of the options below")
    verb.add_argument("--resume", action="store_true", help="go on with the run in --out")
    verb.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    add_options(verb)


def add_data(verb: argparse.ArgumentParser) -> None:
    text = "image folder, table (CSV, TSV, Parquet), CUB_200_2011 or Stanford Cars"
    verb.add_argument("data", metavar="DATA", help=text)


def training_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `add_training_arguments` as keywords of the functions that train."""
    asked = {name: getattr(args, name) for name in ("preset", "device", "resume", "overwrite")}
    chosen = {name: getattr(args, name) for name in settings.options() if getattr(args, name) is not None}
    return {**asked, "config_file": args.config, "display": display_of(args), **chosen}


def add_options(verb: argparse.ArgumentParser, without: Container[str] = ()) -> None:
    """Add a flag for every field of the configuration, with the default preset's values as defaults in its help."""
    shown = presets.resolve("default").to_dict()
    offered = {name: option for name, option in settings.options().items() if name not in without}
    sections = dict.fromkeys(section for section, _, _ in offered.values())
    groups = {section: verb.add_argument_group(f"{section} options") for section in sections}
    for name, (section, entry, kind) in offered.items():
        text = f"{entry.metadata['help']} (default: {_written(shown[section][name], entry.metadata['words'])})"
        flag = "--" + name.replace("_", "-")
        if kind in (bool, bool | None):
            groups[section].add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            usual = METAVARS.get(name) or METAVARS.get(kind, name.split("_")[-1].upper())
            metavar = "|".join(entry.metadata["choices"]) or usual
            groups[section].add_argument(flag, metavar=metavar, help=text)


def _written(value: Any, words: Mapping[str, Any]) -> str:
    for word, meaning in words.items():
        if value == meaning:
            return word
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value) or "none"
