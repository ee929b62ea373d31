"""`likethat atlas`: what every prototype looks for."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from likethat.cli.arguments import DONE, OWN_DATA, add_verb, display_of


def atlas(args: argparse.Namespace) -> int:
    """Show what every prototype looks for: its nearest training and validation patches, as a page and as JSON."""
    from likethat.data.folder_kinds import is_atlas
    from likethat.distributed import is_main_process
    from likethat.explaining.atlas import check_unchanged, make_atlas
    from likethat.report.atlas import PAGE, write_atlas
    from likethat.runs.atomic_files import whole_folder
    from likethat.runs.classifier import load
    from likethat.runs.data import open_run_data

    classifier = load(args.run, args.device)
    out: Path = args.out or args.run / "atlas"
    display = display_of(args)
    with whole_folder(out, is_atlas, overwrite=args.overwrite) if is_main_process() else nullcontext() as folder:
        dataset = open_run_data(classifier, args.data)
        check_unchanged(classifier, dataset)
        found = make_atlas(classifier, dataset, args.k, display)
        if folder is None:
            return DONE
        with display.task("drawing") as advance:
            write_atlas(folder, found, advance)
    print(
        f"{len(found.entries)} prototypes: {len(found.mixed)} with mixed neighbours, "
        f"{len(found.duplicates)} duplicates, {len(found.never_used)} never used"
    )
    print(f"Atlas: {(out / PAGE).resolve()}")
    return DONE


def add(verbs: Any) -> None:
    verb = add_verb(verbs, "atlas", atlas, run=True, data=OWN_DATA, together=True)
    verb.add_argument("--k", type=int, default=5, help="neighbours of each prototype (default: 5)")
    verb.add_argument("--out", type=Path, metavar="DIR", help="folder to make (default: RUN/atlas)")
    verb.add_argument("--overwrite", action="store_true", help="replace an earlier atlas in --out")
