"""`likethat export`: the model in one file for other runtimes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from likethat.cli.arguments import CHECK_FAILED, DONE, OWN_DATA, add_verb, answer, display_of


def export(args: argparse.Namespace) -> int:
    """Write the model as ONNX or as a torch.export program, checked against PyTorch on real pictures."""
    from likethat.workflows.export import CheckFailed, export

    try:
        exported = export(args.run, args.out, args.format, data=args.data, display=display_of(args))
    except CheckFailed as error:
        print(f"likethat: {error}", file=sys.stderr)
        return CHECK_FAILED

    def show() -> None:
        found = ", ".join(f"{name} {value:.1e}" for name, value in exported["max_difference"].items())
        print(f"{args.out.resolve()}: {exported['bytes'] / 1e6:.1f} MB")
        print(f"largest difference to PyTorch on {exported['pictures']} {exported['from']}: {found}")

    answer(args, exported, show)
    return DONE


def add(verbs: Any) -> None:
    verb = add_verb(verbs, "export", export, run=True, data=OWN_DATA, json=True, device=False)
    verb.add_argument("--format", required=True, metavar="onnx|torch", help="ONNX, or a torch.export program (.pt2)")
    verb.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write")
