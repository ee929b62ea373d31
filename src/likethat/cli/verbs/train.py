"""`likethat train`: from images to a finished run."""

from __future__ import annotations

import argparse
from typing import Any

from likethat.cli.arguments import DONE, add_verb
from likethat.cli.training_options import add_training_arguments, training_arguments


def train(args: argparse.Namespace) -> int:
    """Train a ProtoPNet on a folder or a table of images."""
    from likethat.cli.tables import print_summary
    from likethat.workflows.train import train

    print_summary(train(args.data, args.out, tensorboard=args.tensorboard, **training_arguments(args)))
    return DONE


def add(verbs: Any) -> None:
    verb = add_verb(verbs, "train", train, together=True)
    add_training_arguments(verb)
    verb.add_argument("--tensorboard", action="store_true", help="write TensorBoard events into the run folder")
