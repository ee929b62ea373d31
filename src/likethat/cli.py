"""The command line: one function a verb. torch is imported inside the verbs, so that --help answers at once."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from likethat import __version__, config
from likethat.errors import Interrupted, UserError

DONE, CHECK_FAILED, USERS_MISTAKE, INTERRUPTED = 0, 1, 2, 130


def train(args: argparse.Namespace) -> int:
    """Train a ProtoPNet on a folder of images."""
    from likethat.pipeline import train
    from likethat.summary import print_summary

    chosen = {name: getattr(args, name) for name in config.options() if getattr(args, name) is not None}
    classifier = train(
        args.data,
        args.out,
        preset=args.preset,
        config_file=args.config,
        device=args.device,
        resume=args.resume,
        overwrite=args.overwrite,
        tensorboard=args.tensorboard,
        display=_display(args),
        **chosen,
    )
    print_summary(classifier)
    return DONE


def demo(args: argparse.Namespace) -> int:
    """Make the embedded birds, train on them, verify, evaluate and explain; a few minutes on two CPU cores."""
    from likethat.demo import run_demo

    run_demo(args.out, device=args.device, overwrite=args.overwrite, display=_display(args))
    return DONE


def evaluate(args: argparse.Namespace) -> int:
    """Accuracy of a run on its test images, or on other data."""
    from likethat.classifier import load
    from likethat.run_data import evaluate_run
    from likethat.summary import print_evaluation

    evaluation = evaluate_run(load(args.run, args.device), args.data, _display(args))
    _answer(args, evaluation.to_dict(), lambda: print_evaluation(evaluation))
    return DONE


def verify(args: argparse.Namespace) -> int:
    """Prove that every prototype is the latent patch of the training image it names."""
    from likethat.classifier import load
    from likethat.run_data import verify_run
    from likethat.summary import print_verification

    verification = verify_run(load(args.run, args.device), args.data, _display(args))
    _answer(args, verification.to_dict(), lambda: print_verification(verification))
    return DONE if verification.passed else CHECK_FAILED


def predict(args: argparse.Namespace) -> int:
    """The class of each picture, with its probability."""
    from likethat.classifier import load
    from likethat.summary import print_predictions

    classifier = load(args.run, args.device)
    predictions = [
        {"path": path, **prediction.to_dict()}
        for path, prediction in zip(args.images, classifier.predict_all(args.images), strict=True)
    ]
    _answer(args, {"images": predictions}, lambda: print_predictions(predictions))
    return DONE


def info(args: argparse.Namespace) -> int:
    """What a run is: data, model, accuracy, prototypes."""
    from likethat.summary import describe_run, print_description

    description = describe_run(args.run)
    _answer(args, description, lambda: print_description(description))
    return DONE


def data_synth(args: argparse.Namespace) -> int:
    """Make the embedded data set: field-guide birds whose distinguishing parts are known."""
    from likethat.data.synth import make_birds

    if args.dir.exists() and (not args.dir.is_dir() or any(args.dir.iterdir())):
        raise UserError(f"{args.dir} is not empty; choose another folder.")
    display = _display(args)
    with display.task("drawing birds") as advance:
        make_birds(args.dir, species=args.species, seed=args.seed, progress=advance)
    display.line(f"{args.dir}: {args.species} species, with their parts in parts.json")
    return DONE


def data_check(args: argparse.Namespace) -> int:
    """Report every file that training would stumble over."""
    from likethat.data.check import check_dataset
    from likethat.data.dataset import PARTS, open_dataset

    dataset = open_dataset(args.data)
    with _display(args).task("checking images") as advance:
        report = check_dataset(dataset, progress=advance)
    problems = [{"path": p.path, "kind": p.kind, "text": p.text, "warning": p.is_warning} for p in report.problems]
    counts = {part: len(dataset.part(part)) for part in PARTS}

    def show() -> None:
        for problem in report.problems:
            print(f"{'note' if problem.is_warning else 'problem'}: {problem}")
        images = ", ".join(f"{count} {part}" for part, count in counts.items())
        print(f"{dataset.kind}: {len(dataset.classes)} classes, images: {images}; {len(report.errors)} problems")

    document = {"kind": dataset.kind, "classes": list(dataset.classes), "images": counts, "problems": problems}
    _answer(args, document, show)
    return CHECK_FAILED if report.errors else DONE


def _display(args: argparse.Namespace) -> Any:
    from likethat.progress import Display

    return Display(quiet=getattr(args, "json", False) and not sys.stderr.isatty())


def _answer(args: argparse.Namespace, document: Any, show: Callable[[], None]) -> None:
    """With --json, one JSON document on stdout and nothing else there."""
    if args.json:
        print(json.dumps(document, indent=1))
    else:
        show()


class _Parser(argparse.ArgumentParser):
    """Complains as `errors.UserError` does: one sentence, exit code 2."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message[0].upper()}{message[1:]}; see `{self.prog} --help`.")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="likethat", description="Image classifiers that explain themselves: this looks like that.")
    parser.add_argument("--version", action="version", version=f"likethat {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    verb = _add(verbs, "demo", demo)
    verb.add_argument("--out", type=Path, default=Path("demo"), help="folder for data and run (default: demo)")
    verb.add_argument("--overwrite", action="store_true", help="replace an earlier demo there")

    verb = _add(verbs, "train", train)
    verb.add_argument("data", metavar="DATA", help="image folder, CUB_200_2011 or Stanford Cars")
    verb.add_argument("--out", type=Path, required=True, metavar="RUN", help="run folder to make")
    verb.add_argument("--preset", default="default", help=f"{' or '.join(config.PRESETS)} (default: default)")
    verb.add_argument("--config", type=Path, metavar="FILE", help="TOML file with any of the options below")
    verb.add_argument("--resume", action="store_true", help="go on with the run in --out")
    verb.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    verb.add_argument("--tensorboard", action="store_true", help="write TensorBoard events into the run folder")
    _add_options(verb)

    verb = _add(verbs, "evaluate", evaluate, run=True, data=True, json=True)
    verb = _add(verbs, "verify", verify, run=True, data=True, json=True)
    verb = _add(verbs, "predict", predict, run=True, json=True)
    verb.add_argument("images", nargs="+", metavar="IMAGE")
    verb = _add(verbs, "info", info, run=True, json=True)

    group = verbs.add_parser("data", help="make or check data sets", description="Make or check data sets.")
    data_verbs = group.add_subparsers(metavar="VERB", required=True)
    verb = _add(data_verbs, "synth", data_synth)
    verb.add_argument("dir", type=Path, metavar="DIR")
    verb.add_argument("--species", type=int, default=8, help="how many species (default: 8)")
    verb.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default: 0)")
    verb = _add(data_verbs, "check", data_check, json=True)
    verb.add_argument("data", metavar="DATA")
    return parser


def _add(
    verbs: Any,
    name: str,
    function: Callable[[argparse.Namespace], int],
    *,
    run: bool = False,
    data: bool = False,
    json: bool = False,
) -> argparse.ArgumentParser:
    """A verb whose help is its function's docstring, with the arguments that many verbs share."""
    text = (function.__doc__ or "").strip()
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    verb.set_defaults(function=function)
    if run:
        verb.add_argument("run", type=Path, metavar="RUN", help="run folder")
    if data:
        verb.add_argument("--data", metavar="DATA", help="where the data lies, if not where it was at training")
    if json:
        verb.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    verb.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    return verb


def _add_options(verb: argparse.ArgumentParser) -> None:
    """A flag for every field of the configuration. Defaults are shown as the default preset has them."""
    shown = config.resolve("default").to_dict()
    groups = {section: verb.add_argument_group(f"{section} options") for section in config.SECTIONS}
    for name, (section, entry, kind) in config.options().items():
        default = shown[section][name]
        text = f"{entry.metadata['help']} (default: {_written(default)})"
        flag = "--" + name.replace("_", "-")
        if kind is bool:
            groups[section].add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            metavar = "|".join(entry.metadata["choices"]) or name.split("_")[-1].upper()
            groups[section].add_argument(flag, metavar=metavar, help=text)


def _written(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    try:
        args = build_parser().parse_args(arguments)
        return int(args.function(args))
    except UserError as error:
        print(f"likethat: {error}", file=sys.stderr)
        return USERS_MISTAKE
    except (Interrupted, KeyboardInterrupt):
        again = shlex.join(["likethat", *arguments, *([] if "--resume" in arguments else ["--resume"])])
        print(f"likethat: stopped{f'; go on with: {again}' if 'train' in arguments[:1] else ''}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader went away, as `likethat info RUN | head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except MemoryError:
        print("likethat: out of memory; use a smaller --batch-size or --input-size.", file=sys.stderr)
        return USERS_MISTAKE
