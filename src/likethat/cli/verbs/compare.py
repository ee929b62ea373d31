"""`likethat compare`: what a run and its baseline can say about one picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from likethat.cli.arguments import DONE, add_verb
from likethat.errors import UserError


def compare(args: argparse.Namespace) -> int:
    """Draw what a run and its baseline can say about one picture."""
    from likethat.report.comparison import comparison_figure
    from likethat.runs.atomic_files import atomic_path
    from likethat.runs.baseline import load_baseline
    from likethat.runs.classifier import load

    if args.out.suffix.lower() != ".png":
        raise UserError(f"The comparison is a PNG picture; {args.out} does not end with .png.")
    classifier, baseline = load(args.run, args.device), load_baseline(args.baseline, args.device)
    figure = comparison_figure(classifier, baseline, args.image)
    with atomic_path(args.out) as temporary:
        figure.save(temporary, "PNG")
    print(args.out.resolve())
    return DONE


def add(verbs: Any) -> None:
    verb = add_verb(verbs, "compare", compare, run=True)
    verb.add_argument("baseline", type=Path, metavar="BASELINE", help="run folder that `likethat baseline` made")
    verb.add_argument("image", metavar="IMAGE", help="picture to explain")
    verb.add_argument("--out", type=Path, required=True, metavar="FILE.png", help="picture to write")
