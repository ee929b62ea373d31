"""`likethat baseline` and `likethat compare`: the plain counterpart, and what it can say about a picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from likethat.cli.arguments import DONE, add_verb
from likethat.cli.verbs.train import add_training_arguments, training_arguments
from likethat.errors import UserError


def baseline(args: argparse.Namespace) -> int:
    """Train the plain counterpart of a ProtoPNet, which does not explain itself."""
    from likethat.cli.tables import print_summary
    from likethat.workflows.baseline import train_baseline

    print_summary(train_baseline(args.data, args.out, **training_arguments(args)))
    return DONE


def compare(args: argparse.Namespace) -> int:
    """Draw what a run and its baseline can say about one picture."""
    from likethat.report.comparison import comparison_figure
    from likethat.runs.atomic_files import atomic_path
    from likethat.runs.baseline import load_plain
    from likethat.runs.classifier import load

    if args.out.suffix.lower() != ".png":
        raise UserError(f"The comparison is a PNG picture; {args.out} does not end with .png.")
    classifier, plain = load(args.run, args.device), load_plain(args.baseline, args.device)
    figure = comparison_figure(classifier, plain, args.image)
    with atomic_path(args.out) as temporary:
        figure.save(temporary, "PNG")
    print(args.out.resolve())
    return DONE


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "baseline", baseline)
    add_training_arguments(verb)

    verb = add_verb(verbs, "compare", compare, run=True)
    verb.add_argument("baseline", type=Path, metavar="BASELINE", help="run folder that `likethat baseline` made")
    verb.add_argument("image", metavar="IMAGE")
    verb.add_argument("--out", type=Path, required=True, metavar="FILE.png", help="picture to write")
