"""`likethat combine`: several runs as one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from likethat.cli.arguments import DONE, OWN_DATA, add_out, add_verb, answer, display_of


def combine(args: argparse.Namespace) -> int:
    """Sum the logits of several runs over the same classes, and write a new run."""
    from likethat.cli.tables import print_combination
    from likethat.workflows.combine import combine

    places: dict[str, Any] = {"data": args.data, "device": args.device, "overwrite": args.overwrite}
    combined = combine(args.runs, args.out, **places, display=display_of(args))
    answer(args, combined, lambda: print_combination(combined, args.out))
    return DONE


def add(verbs: Any) -> None:
    verb = add_verb(verbs, "combine", combine, data=OWN_DATA, json=True)
    verb.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    add_out(verb)
