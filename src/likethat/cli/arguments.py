"""What the verbs share: exit codes, common arguments, and how they answer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from likethat.distributed import is_main_process

if TYPE_CHECKING:
    from likethat.data.pictures import Skipped
    from likethat.progress import Display

DONE, CHECK_FAILED, USERS_MISTAKE, INTERRUPTED = 0, 1, 2, 130

OWN_DATA = "where the data lies, if not where it was at training"
OTHER_DATA = "where the data lies now, or other data of the same classes"

Verb = Callable[[argparse.Namespace], int]


def add_verb(
    verbs: Any,
    name: str,
    function: Verb,
    *,
    run: bool = False,
    data: str | None = None,
    json: bool = False,
    device: bool = True,
    together: bool = False,
) -> argparse.ArgumentParser:
    """Add a verb whose help is its function's docstring, with the arguments that many verbs share; torchrun may start
    those that work `together`. `data` is the help of --data."""
    text = (function.__doc__ or "").strip()
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    verb.set_defaults(function=function, together=together)
    if run:
        verb.add_argument("run", type=Path, metavar="RUN", help="run folder")
    if data is not None:
        verb.add_argument("--data", metavar="DATA", help=data)
    if json:
        verb.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    if device:
        verb.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    return verb


def add_out(verb: argparse.ArgumentParser, *, required: bool = True) -> None:
    verb.add_argument("--out", type=Path, required=required, metavar="RUN", help="run folder to make")
    verb.add_argument("--overwrite", action="store_true", help="replace the run in --out")


def add_level(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--level",
        type=float,
        metavar="P",
        help="share of true classes that prediction sets must hold (default: the largest of 0.8, 0.9 and 0.95 that "
        "the validation images support)",
    )


def display_of(args: argparse.Namespace) -> Display:
    """Return a display that writes to stderr: with --json only for a person to see, and only in the main process."""
    from likethat.progress import Display

    unseen = getattr(args, "json", False) and not sys.stderr.isatty()
    return Display(quiet=unseen or not is_main_process())


def tell_skipped(skipped: Iterable[Skipped]) -> None:
    for entry in skipped:
        print(f"likethat: skipped {entry.path}: {entry.reason}", file=sys.stderr)


def answer(args: argparse.Namespace, document: Any, show: Callable[[], None]) -> None:
    """Print one JSON document and nothing else with --json; without it, call `show`."""
    if args.json:
        print(json.dumps(document, indent=1))
    else:
        show()
