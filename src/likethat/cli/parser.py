"""The command line. torch is imported inside the verbs, so that --help answers at once."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any

from likethat import __version__, distributed
from likethat.cli.arguments import DONE, INTERRUPTED, USERS_MISTAKE
from likethat.errors import Interrupted, UserError
from likethat.runtime import memory_shortage_told

# Modules of `cli.verbs`, in the order in which --help lists them.
VERBS = """demo train evaluate verify predict calibrate info data explain atlas certify prune combine edit export
    baseline compare serve reproduce bench""".split()


class _Parser(argparse.ArgumentParser):
    """Complains as `errors.UserError` does: one sentence, exit code 2."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message[0].upper()}{message[1:]}; see `{self.prog} --help`.")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="likethat", description="Image classifiers that explain themselves: this looks like that.")
    parser.add_argument("--version", action="version", version=f"likethat {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name in VERBS:
        import_module(f"likethat.cli.verbs.{name}").add(verbs)
    return parser


def main(argv: list[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Names that the output's encoding lacks, or that are not valid Unicode, are escaped, as stderr always does.
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:] if argv is None else argv
    try:
        args = build_parser().parse_args(arguments)
        with memory_shortage_told():
            return _work_together(args) if distributed.launched() else int(args.function(args))
    except UserError as error:
        print(f"likethat{_process()}: {error}", file=sys.stderr)
        return USERS_MISTAKE
    except (Interrupted, KeyboardInterrupt):
        print(f"likethat{_process()}: stopped{_how_to_go_on(arguments)}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader went away, as `likethat info RUN | head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        if error.filename is None:
            raise
        # Names that cannot be, such as those that are too long, and what may not be read or written.
        print(f"likethat: {error.filename} cannot be used ({error.strerror}); choose another.", file=sys.stderr)
        return USERS_MISTAKE


def _work_together(args: argparse.Namespace) -> int:
    """Work as one of the processes that torchrun started; only the main process answers."""
    if not args.together or getattr(args, "interpretability", False):
        raise UserError(
            "Only train, baseline, evaluate, predict and atlas use several processes; start this without torchrun."
        )
    with distributed.session(), open(os.devnull, "w", errors="replace") as nowhere:
        stdout = sys.stdout if distributed.is_main_process() else nowhere
        with redirect_stdout(stdout):
            return int(args.function(args))


def _process() -> str:
    return f" (process {os.environ['RANK']})" if distributed.launched() else ""


def _how_to_go_on(arguments: list[str]) -> str:
    to_file = arguments[:1] == ["predict"] and any(word.startswith("--out") for word in arguments)
    if arguments[:1] == ["reproduce"] or to_file:
        return f"; go on with: {shlex.join(['likethat', *arguments])}"
    if arguments[:1] not in (["train"], ["baseline"]):
        return ""
    kept = [word for word in arguments if word not in ("--resume", "--overwrite")]
    return f"; go on with: {shlex.join(['likethat', *kept, '--resume'])}"
