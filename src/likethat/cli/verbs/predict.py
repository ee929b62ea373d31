"""`likethat predict`: the class of each picture, on the terminal or in a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from likethat.cli.arguments import DONE, add_level, add_verb, answer, display_of, tell_skipped
from likethat.distributed import is_main_process, world_size
from likethat.errors import UserError


def predict(args: argparse.Namespace) -> int:
    """Name the class of each picture, with its probability; with --out also why, for any number of them."""
    if args.out is not None:
        return _to_file(args)
    if args.overwrite:
        raise UserError("--overwrite replaces the file of --out; name one, or leave it out.")
    if world_size() > 1:
        raise UserError("Several processes write one file; name it with --out, or start this without torchrun.")
    from likethat.cli.tables import print_predictions
    from likethat.data.pictures import Skipped, find_pictures
    from likethat.explaining.files import predict_files
    from likethat.runs.classifier import load
    from likethat.runs.layout import read_record

    paths: list[str] = []
    skipped: list[Skipped] = []
    for source in args.images:  # one by one: a picture that is named twice is answered twice
        pictures, others = find_pictures([source], read_record(args.run).config.data)
        paths += pictures
        skipped += others
    answered = list(predict_files(load(args.run, args.device), paths, args.level))
    skipped += [found for found in answered if isinstance(found, Skipped)]
    predictions = [(path, found) for path, found in zip(paths, answered, strict=True) if not isinstance(found, Skipped)]
    tell_skipped(skipped)
    if not predictions:
        raise UserError("Nothing was predicted, since no picture was found; name pictures or folders with pictures.")
    images = [{"path": path, **prediction.to_dict()} for path, prediction in predictions]
    document = {"images": images, "skipped": [vars(entry) for entry in skipped]}
    answer(args, document, lambda: print_predictions(predictions))
    return DONE


def _to_file(args: argparse.Namespace) -> int:
    from likethat.workflows.predict.run import predict_to_file

    answered = predict_to_file(
        args.run,
        args.images,
        args.out,
        level=args.level,
        device=args.device,
        overwrite=args.overwrite,
        display=display_of(args),
    )
    if is_main_process():
        tell_skipped(answered.skipped)

    def show() -> None:
        unread = f"; {answered.unread} could not be read, and their rows say why" if answered.unread else ""
        print(f"{answered.out.resolve()}: answers about {answered.pictures} pictures{unread}")

    answer(args, answered.to_dict(), show)
    return DONE


def add(verbs: Any) -> None:
    verb = add_verb(verbs, "predict", predict, run=True, json=True, together=True)
    text = "picture, folder with pictures at any depth, table of pictures, or CUB or Cars"
    verb.add_argument("images", nargs="+", metavar="DATA", help=text)
    verb.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="table to write, with prediction sets and the strongest reasons: .csv, .jsonl or .parquet; a call that "
        "was stopped goes on where it was",
    )
    verb.add_argument("--overwrite", action="store_true", help="replace the file in --out")
    add_level(verb)
