"""`likethat bench`: what prototypes cost on this machine, next to the goals."""

from __future__ import annotations

import argparse
from typing import Any

from likethat.cli.arguments import CHECK_FAILED, DONE, add_verb, answer, display_of


def bench(args: argparse.Namespace) -> int:
    """Measure what prototypes cost next to the bare network, as ratios beside their goals."""
    from likethat.bench.run import run_bench
    from likethat.bench.table import print_bench

    result = run_bench(args.device, args.quick, args.compile, display_of(args))
    answer(args, result.to_dict(), lambda: print_bench(result))
    return DONE if result.met else CHECK_FAILED


def add(verbs: Any) -> None:
    verb = add_verb(verbs, "bench", bench, json=True)
    verb.add_argument("--quick", action="store_true", help="one small network at the size of the demo: about a minute")
    verb.add_argument("--compile", action="store_true", help="compile both sides, as train --compile does")
