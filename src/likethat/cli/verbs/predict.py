"""`likethat predict`: the class of each picture."""

from __future__ import annotations

import argparse
from typing import Any

from likethat.cli.arguments import DONE, add_level, add_verb, answer, tell_skipped
from likethat.errors import UserError


def predict(args: argparse.Namespace) -> int:
    """Name the class of each picture, with its probability."""
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


def add(verbs: Any) -> None:
    verb = add_verb(verbs, "predict", predict, run=True, json=True)
    verb.add_argument("images", nargs="+", metavar="IMAGE", help="picture, or folder with pictures at any depth")
    add_level(verb)
