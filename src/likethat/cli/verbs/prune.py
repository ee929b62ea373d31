"""`likethat prune`: a run with fewer prototypes or connections."""

from __future__ import annotations

import argparse
from typing import Any

from likethat.cli.arguments import DONE, OWN_DATA, add_out, add_verb, answer, display_of
from likethat.errors import UserError


def prune(args: argparse.Namespace) -> int:
    """Write a new run with fewer connections, or without prototypes that look like other classes or are not missed."""
    from likethat.cli.tables import print_pruning
    from likethat.workflows.prune import prune

    rule = {name: getattr(args, name) for name in ("k", "threshold") if getattr(args, name) is not None}
    ways = [bool(rule or args.keep_one), args.budget is not None, args.per_class is not None]
    if sum(ways) > 1:
        raise UserError(
            "--budget, --per-class and the rule of --k, --threshold and --keep-one are three ways: prune twice."
        )
    names = ("keep_one", "budget", "per_class", "data", "device", "overwrite")
    asked = {name: getattr(args, name) for name in names}
    pruned = prune(args.run, args.out, **rule, **asked, display=display_of(args))
    answer(args, pruned, lambda: print_pruning(pruned, args.out))
    return DONE


def add(verbs: Any) -> None:
    verb = add_verb(verbs, "prune", prune, run=True, data=OWN_DATA, json=True)
    add_out(verb)
    verb.add_argument("--k", type=int, help="nearest training images to look at for each prototype (default: 6)")
    verb.add_argument("--threshold", type=int, help="how many of the K must be of its own class (default: 3)")
    verb.add_argument("--keep-one", action="store_true", help="keep the best prototype of a class that would lose all")
    verb.add_argument(
        "--budget",
        type=int,
        metavar="N",
        help="instead: keep at most N connections; prototypes go only where they must",
    )
    verb.add_argument(
        "--per-class",
        type=_count_or_auto,
        metavar="N",
        help="instead: keep at most N prototypes of each class; auto: as few as keep the validation accuracy",
    )


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)
