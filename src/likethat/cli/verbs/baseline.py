"""`likethat baseline`: the same backbone without prototypes."""

from __future__ import annotations

import argparse
from typing import Any

from likethat.cli.arguments import DONE, add_verb
from likethat.cli.training_options import add_training_arguments, training_arguments


def baseline(args: argparse.Namespace) -> int:
    """Train the baseline, the same backbone without prototypes, which does not explain itself."""
    from likethat.cli.tables import print_summary
    from likethat.workflows.baseline import train_baseline

    print_summary(train_baseline(args.data, args.out, as_long=args.as_long, **training_arguments(args)))
    return DONE


def add(verbs: Any) -> None:
    verb = add_verb(verbs, "baseline", baseline, together=True)
    verb.add_argument(
        "--as-long",
        action="store_true",
        help="go on through all stages of the preset, with the views, targets and epochs of its ProtoPNet",
    )
    add_training_arguments(verb)
