"""`likethat explain`: why a picture got its class."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from likethat.cli.arguments import DONE, add_level, add_verb, answer, display_of, tell_skipped
from likethat.errors import UserError

DEFAULT_OUT = "explanations"
SEARCHED = "note: prototypes are first looked for in their own training pictures, too; this takes a while, once a run"


def explain(args: argparse.Namespace) -> int:
    """Explain why each picture got its class, with scoring sheets as a page, as pictures and as JSON."""
    from likethat.data.folder_kinds import is_explanations
    from likethat.data.pictures import Skipped, find_pictures
    from likethat.explaining.draw.page import write_explanations
    from likethat.explaining.explanation import Options
    from likethat.explaining.files import DATA, PAGE, explain_files, save_sheets, sheet_names
    from likethat.explaining.hiding import read_box
    from likethat.runs.atomic_files import whole_folder, write_json
    from likethat.runs.classifier import load
    from likethat.runs.layout import ATTRIBUTED, read_record

    out: Path | None = args.out or (None if args.json else _free_folder(args.overwrite))
    with whole_folder(out, is_explanations, overwrite=args.overwrite) if out else nullcontext() as folder:
        classifier = load(args.run, args.device)
        paths, skipped = find_pictures(args.images, read_record(args.run).config.data)
        names = sheet_names(paths, ".pdf" if args.pdf else ".png") if folder else {}
        hide = [read_box(text) for text in args.hide]
        options = Options(args.top_classes, args.against, level=args.level, attribution=args.attribution)
        display = display_of(args)
        if args.attribution != "upsampling" and not (classifier.path / ATTRIBUTED).is_file():
            display.line(SEARCHED)
        with display.task("explaining") as advance:
            answers = explain_files(classifier, paths, options, advance, hide=hide)
            if folder:
                answers = save_sheets(folder, answers, names, args.colours, long=args.long)
            answered = list(answers)
        skipped += [found for found in answered if isinstance(found, Skipped)]
        explanations = [found for found in answered if not isinstance(found, Skipped)]
        tell_skipped(skipped)
        if not explanations:
            raise UserError(
                "Nothing was explained, since no picture was found; name pictures or folders with pictures."
            )
        images = [{**found.to_dict(args.maps), "sheet": names.get(found.path or "")} for found in explanations]
        document = {"images": images, "skipped": [vars(entry) for entry in skipped]}
        if folder:
            write_explanations(folder / PAGE, explanations, args.colours)
            write_json(folder / DATA, document)

    def show() -> None:
        for explanation in explanations:
            print(explanation)
        if out:
            print(f"Page: {(out / PAGE).resolve()}")

    answer(args, document, show)
    return DONE


def _free_folder(overwrite: bool) -> Path:
    """Return the first of explanations, explanations-2 and so on that is not there; with --overwrite, the first."""
    out, number = Path(DEFAULT_OUT), 1
    while os.path.lexists(out) and not overwrite:
        number += 1
        out = Path(f"{DEFAULT_OUT}-{number}")
    return out


def add(verbs: Any) -> None:
    verb = add_verb(verbs, "explain", explain, run=True, json=True)
    verb.add_argument("images", nargs="+", metavar="IMAGE", help="picture, folder with pictures at any depth, or table")
    verb.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder to make (default: explanations, explanations-2, ...; none with --json)",
    )
    verb.add_argument("--overwrite", action="store_true", help="replace earlier explanations in --out")
    verb.add_argument("--top-classes", type=int, default=3, metavar="N", help="classes to explain (default: 3)")
    verb.add_argument("--against", metavar="CLASS", help="say why not this class (default: the runner-up)")
    add_level(verb)
    verb.add_argument(
        "--attribution",
        choices=("upsampling", "gradient", "occlusion"),
        default="upsampling",
        help="how the parts of a picture are found: as in the paper (default), or finer and slower",
    )
    verb.add_argument(
        "--hide",
        action="append",
        default=[],
        metavar="X0,Y0,X1,Y1",
        help="paint this part over first, in pixels of the picture; may be given several times",
    )
    verb.add_argument("--long", action="store_true", help="draw all classes on each sheet, not one page under 500 kB")
    verb.add_argument("--pdf", action="store_true", help="draw the sheets as PDF instead of PNG")
    verb.add_argument("--maps", action="store_true", help="put the similarity maps into the JSON document")
    verb.add_argument(
        "--colours", choices=("ember", "jet"), default="ember", help="colours of activation maps (default: ember)"
    )
