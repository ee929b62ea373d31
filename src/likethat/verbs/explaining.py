"""`likethat explain` and `likethat atlas`: why a picture got its class, and what the prototypes look for."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from likethat.errors import UserError
from likethat.verbs.common import DONE, add_verb, answer, display_of


def explain(args: argparse.Namespace) -> int:
    """Why each picture got its class: scoring sheets as a page, as pictures and as JSON."""
    from likethat.classifier import load
    from likethat.explaining.files import DATA, PAGE, Folder, Skipped, explain_files, find_pictures
    from likethat.explaining.folder import whole_folder

    out: Path | None = args.out or (None if args.json else Path("explanations"))
    images: list[dict[str, Any]] = []
    with whole_folder(out, DATA, overwrite=args.overwrite) if out else nullcontext() as new:
        classifier = load(args.run, args.device)
        folder = Folder(new, args.colours) if new else None
        paths, skipped = find_pictures(args.images)
        with display_of(args).task("explaining") as advance:
            answers = explain_files(
                classifier, paths, top_classes=args.top_classes, against=args.against, advance=advance
            )
            for found in answers:
                if isinstance(found, Skipped):
                    skipped.append(found)
                    continue
                sheet = {"sheet": folder.add(found)} if folder else {}
                images.append({**found.to_dict(args.maps), **sheet})
        for entry in skipped:
            print(f"likethat: skipped {entry.path}: {entry.reason}", file=sys.stderr)
        if not images:
            raise UserError(
                "Nothing was explained, since no picture was found; name pictures or folders with pictures."
            )
        document = {"images": images, "skipped": [vars(entry) for entry in skipped]}
        if folder:
            folder.finish(document)

    def show() -> None:
        for image in images:
            print(f"{image['path']}: {image['predicted']} ({image['classes'][0]['probability']:.1%})")
        if out:
            print(f"Page: {(out / PAGE).resolve()}")

    answer(args, document, show)
    return DONE


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "explain", explain, run=True, json=True)
    verb.add_argument("images", nargs="+", metavar="IMAGE", help="picture, or folder with pictures at any depth")
    verb.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to make (default: explanations, or none with --json)"
    )
    verb.add_argument("--overwrite", action="store_true", help="replace earlier explanations in --out")
    verb.add_argument("--top-classes", type=int, default=3, metavar="N", help="classes explained (default: 3)")
    verb.add_argument("--against", metavar="CLASS", help="also say why not this class")
    verb.add_argument("--maps", action="store_true", help="put the similarity maps into the JSON document")
    verb.add_argument(
        "--colours", choices=("ember", "jet"), default="ember", help="of activation maps (default: ember)"
    )
