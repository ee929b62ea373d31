"""`likethat verify`: proves that prototypes are what they are said to be."""

from __future__ import annotations

import argparse
from typing import Any

from likethat.cli.arguments import CHECK_FAILED, DONE, OWN_DATA, add_verb, answer, display_of


def verify(args: argparse.Namespace) -> int:
    """Prove that every prototype is the latent patch of the training image it names and, for a run with --windows, that
    nothing outside a box can change a similarity."""
    from likethat.cli.tables import print_verification
    from likethat.workflows.verify import verify_folder

    verification = verify_folder(args.run, args.data, args.device, display_of(args))
    answer(args, verification.to_dict(), lambda: print_verification(verification))
    return DONE if verification.passed else CHECK_FAILED


def add(verbs: Any) -> None:
    add_verb(verbs, "verify", verify, run=True, data=OWN_DATA, json=True)
