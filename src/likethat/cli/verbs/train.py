"""`likethat train` and `likethat demo`."""

from __future__ import annotations

import argparse
from collections.abc import Container
from pathlib import Path
from typing import Any

from likethat import config
from likethat.cli.arguments import DONE, add_verb, display_of


def train(args: argparse.Namespace) -> int:
    """Train a ProtoPNet on a folder of images."""
    from likethat.cli.tables import print_summary
    from likethat.workflows.train import train

    print_summary(train(args.data, args.out, tensorboard=args.tensorboard, **training_arguments(args)))
    return DONE


def demo(args: argparse.Namespace) -> int:
    """Make the embedded birds, train on them, verify, evaluate and explain; a few minutes on two CPU cores."""
    from likethat.workflows.demo import run_demo

    run_demo(args.out, device=args.device, overwrite=args.overwrite, display=display_of(args))
    return DONE


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "demo", demo)
    verb.add_argument("--out", type=Path, default=Path("demo"), help="folder for data and run (default: demo)")
    verb.add_argument("--overwrite", action="store_true", help="replace an earlier demo there")

    verb = add_verb(verbs, "train", train)
    add_training_arguments(verb)
    verb.add_argument("--tensorboard", action="store_true", help="write TensorBoard events into the run folder")


def add_training_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("data", metavar="DATA", help="image folder, CUB_200_2011 or Stanford Cars")
    verb.add_argument("--out", type=Path, required=True, metavar="RUN", help="run folder to make")
    verb.add_argument("--preset", default="default", help=f"{' or '.join(config.PRESETS)} (default: default)")
    verb.add_argument("--config", type=Path, metavar="FILE", help="TOML file with any of the options below")
    verb.add_argument("--resume", action="store_true", help="go on with the run in --out")
    verb.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    add_options(verb)


def training_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What `add_training_arguments` asked for, as the keywords of the functions that train."""
    asked = {name: getattr(args, name) for name in ("preset", "device", "resume", "overwrite")}
    chosen = {name: getattr(args, name) for name in config.options() if getattr(args, name) is not None}
    return {**asked, "config_file": args.config, "display": display_of(args), **chosen}


def add_options(verb: argparse.ArgumentParser, without: Container[str] = ()) -> None:
    """A flag for every field of the configuration. Defaults are shown as the default preset has them."""
    shown = config.resolve("default").to_dict()
    groups = {section: verb.add_argument_group(f"{section} options") for section in config.SECTIONS}
    for name, (section, entry, kind) in config.options().items():
        if name in without:
            continue
        text = f"{entry.metadata['help']} (default: {_written(shown[section][name])})"
        flag = "--" + name.replace("_", "-")
        if kind is bool:
            groups[section].add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            metavar = "|".join(entry.metadata["choices"]) or name.split("_")[-1].upper()
            groups[section].add_argument(flag, metavar=metavar, help=text)


def _written(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
