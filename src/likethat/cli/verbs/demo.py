"""`likethat demo`: the whole way on embedded birds."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from likethat.cli.arguments import DONE, add_verb, display_of


def demo(args: argparse.Namespace) -> int:
    """Draw the embedded birds, train on them and verify the run; a few minutes on two CPU cores."""
    from likethat.cli.tables import print_summary, print_verification
    from likethat.runs import layout
    from likethat.workflows.demo import run_demo

    started = time.monotonic()
    classifier, verification = run_demo(
        args.out, device=args.device, overwrite=args.overwrite, display=display_of(args)
    )
    print_verification(verification)
    print_summary(classifier)
    report = (classifier.path / layout.REPORT).resolve()
    print(f"Done in {time.monotonic() - started:.0f} s. Open {report} in a browser.")
    return DONE


def add(verbs: Any) -> None:
    verb = add_verb(verbs, "demo", demo)
    verb.add_argument("--out", type=Path, default=Path("demo"), help="folder for data and run (default: demo)")
    verb.add_argument("--overwrite", action="store_true", help="replace an earlier demo there")
