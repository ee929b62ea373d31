"""`likethat reproduce`: the paper's table for any data set."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from likethat.cli.arguments import CHECK_FAILED, DONE, add_verb, answer, display_of
from likethat.cli.training_options import add_data, add_options
from likethat.config import presets, settings
from likethat.workflows.reproduce import OWN_OPTIONS


def reproduce(args: argparse.Namespace) -> int:
    """Compare baselines and ProtoPNets over backbones and seeds: the paper's Table 1 for your data."""
    from likethat.data.folder_kinds import TABLE
    from likethat.workflows.reproduce.study import reproduce

    own = ("weights", "seeds", "presets", "full_images", "as_long", "interpretability", "jobs", "device")
    asked = {name: getattr(args, name) for name in own}
    options = {name: getattr(args, name) for name in settings.options() if name not in OWN_OPTIONS}
    chosen = {name: value for name, value in options.items() if value is not None}
    asked |= {"config_file": args.config, "display": display_of(args), **chosen}
    document = reproduce(args.data, args.backbones, args.out, **asked)
    answer(args, document, lambda: print((args.out / f"{TABLE}.md").read_text(encoding="utf-8")))
    return DONE if document["complete"] else CHECK_FAILED


def add(verbs: Any) -> None:
    verb = add_verb(verbs, "reproduce", reproduce, json=True)
    add_data(verb)
    verb.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for all runs and the table")
    verb.add_argument("--backbones", nargs="+", required=True, metavar="NAME", help="timm models, one a column")
    verb.add_argument(
        "--weights",
        nargs="+",
        default=[],
        metavar="FILE",
        help="backbone weights: pretrained, torchvision, none or a file, one for each backbone or one for all "
        "(default: each preset's own)",
    )
    verb.add_argument("--seeds", type=int, default=3, metavar="N", help="number of seeds, from 0 (default: 3)")
    verb.add_argument(
        "--presets",
        nargs="+",
        default=["default"],
        metavar="PRESET",
        help=f"presets to train, of {', '.join(presets.PRESETS)} (default: default)",
    )
    verb.add_argument("--full-images", action="store_true", help="train on whole pictures, too")
    verb.add_argument(
        "--as-long",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train baselines as long as the ProtoPNet of each preset, too, which takes about as long as that",
    )
    verb.add_argument(
        "--interpretability",
        choices=("val", "test"),
        default="",
        help="measure the explanations, too, on the images of that part",
    )
    verb.add_argument("--jobs", type=int, default=1, metavar="N", help="number of runs at a time (default: 1)")
    verb.add_argument("--config", type=Path, metavar="FILE", help="TOML file with any of the options below")
    add_options(verb, without=OWN_OPTIONS)
