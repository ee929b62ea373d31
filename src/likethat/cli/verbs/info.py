"""`likethat info`: what a run is."""

from __future__ import annotations

import argparse
from typing import Any

from likethat.cli.arguments import DONE, add_verb, answer


def info(args: argparse.Namespace) -> int:
    """Show what a run is: data, model, accuracy, prototypes."""
    from likethat.cli.tables import print_description
    from likethat.runs.describe import describe_run

    description = describe_run(args.run)
    answer(args, description, lambda: print_description(description))
    return DONE


def add(verbs: Any) -> None:
    add_verb(verbs, "info", info, run=True, json=True, device=False)
