"""`likethat calibrate`: measures what a run may promise about a picture."""

from __future__ import annotations

import argparse
from typing import Any

from likethat.cli.arguments import DONE, OTHER_DATA, add_verb, answer, display_of


def calibrate(args: argparse.Namespace) -> int:
    """Measure, on validation images or on new ones (--data), what a run may promise about a picture."""
    from likethat.cli.tables import print_calibration
    from likethat.runs.classifier import load
    from likethat.workflows.calibrate import calibrate_run

    calibration = calibrate_run(load(args.run, args.device), args.data, display_of(args))
    answer(args, calibration.to_dict(), lambda: print_calibration(calibration))
    return DONE


def add(verbs: Any) -> None:
    add_verb(verbs, "calibrate", calibrate, run=True, data=OTHER_DATA, json=True)
