"""`likethat data synth`, `likethat data check` and `likethat data audit`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from likethat.cli.arguments import CHECK_FAILED, DONE, OWN_DATA, add_verb, answer, display_of
from likethat.cli.training_options import add_data, add_options
from likethat.config import presets, settings
from likethat.errors import UserError

TABLE_OPTIONS = ("columns", "images", "value_range", "val_fraction", "test_fraction", "seed")


def synth(args: argparse.Namespace) -> int:
    """Make the embedded data set: field-guide birds whose distinguishing parts are known."""
    from likethat.data.synthetic.field_guide import SPECIES, make_birds

    if not 2 <= args.species <= len(SPECIES):
        raise UserError(f"--species takes 2 to {len(SPECIES)}, not {args.species}.")
    if args.dir.exists() and (not args.dir.is_dir() or any(args.dir.iterdir())):
        raise UserError(f"{args.dir} is not empty; choose another folder.")
    display = display_of(args)
    with display.task("drawing birds") as advance:
        make_birds(args.dir, species=args.species, seed=args.seed, progress=advance)
    display.line(f"{args.dir}: {args.species} species, with their parts in parts.json")
    return DONE


def check(args: argparse.Namespace) -> int:
    """Report every file that training would stumble over."""
    from likethat.data.check import check_dataset
    from likethat.data.dataset import PARTS
    from likethat.data.formats import open_by_config
    from likethat.data.left_out import find_left_out

    chosen = {name: getattr(args, name) for name in TABLE_OPTIONS if getattr(args, name) is not None}
    dataset = open_by_config(args.data, presets.resolve(**chosen))
    with display_of(args).task("checking images") as advance:
        report = check_dataset(dataset, progress=advance)
    if args.pairs is not None:
        from likethat.report.near_duplicates import write_pairs

        write_pairs(args.pairs, dataset, report.near_duplicates)
    found = [*report.problems, *find_left_out(dataset)]
    problems = [{"path": p.path, "kind": p.kind, "text": p.text, "warning": p.is_warning} for p in found]
    counts = {part: len(dataset.part(part)) for part in PARTS}

    def show() -> None:
        for problem in found:
            print(f"{'note' if problem.is_warning else 'problem'}: {problem}")
        for note in report.notes:
            print(f"note: {note}")
        images = ", ".join(f"{count} {part}" for part, count in counts.items())
        print(f"{dataset.kind}: {len(dataset.classes)} classes, images: {images}; {report.counted}")

    near = [asdict(pair) for pair in report.near_duplicates]
    document = {
        "kind": dataset.kind,
        "classes": list(dataset.classes),
        "images": counts,
        "problems": problems,
        "notes": list(report.notes),
        "near_duplicates": near,
    }
    answer(args, document, show)
    return CHECK_FAILED if report.errors else DONE


def audit(args: argparse.Namespace) -> int:
    """Rank the training and validation pictures of a run by how much the evidence contradicts their label."""
    from likethat.data.folder_kinds import is_audit
    from likethat.report.audit import PAGE, TABLE, write_audit
    from likethat.runs.atomic_files import check_replaceable, whole_folder
    from likethat.workflows.audit.run import audit_run

    if args.most < 1:
        raise UserError(f"--most takes at least 1 picture, not {args.most}.")
    out, display = args.out or args.run / "audit", display_of(args)
    check_replaceable(out, is_audit, overwrite=args.overwrite)
    found = audit_run(args.run, args.data, args.device, display)
    with whole_folder(out, is_audit, overwrite=args.overwrite) as folder:
        explanations = []
        with display.task("scoring sheets") as advance:
            for explanation in found.explained(args.most):
                explanations.append(explanation)
                advance(len(explanations), min(args.most, len(found.doubts)))
        write_audit(folder, args.run.resolve().name, found.doubts, explanations, found.notes)
    shown = [
        {
            "path": doubt.path,
            "part": doubt.part,
            "class": doubt.class_name,
            "looks_like": doubt.suggested,
            "probability_of_class": doubt.label_probability,
            "probability_of_looks_like": doubt.suggested_probability,
        }
        for doubt in found.doubts[: args.most]
    ]
    document = {"pictures": len(found.doubts), "first": shown, "notes": list(found.notes), "out": str(out)}

    def show() -> None:
        for rank, doubt in enumerate(found.doubts[:10], start=1):
            print(f"{rank}: {doubt.path} is labelled {doubt.class_name} and looks like {doubt.suggested}")
        for note in found.notes:
            print(note)
        print(f"Page: {(out / PAGE).resolve()}\nTable of all {len(found.doubts)} pictures: {(out / TABLE).resolve()}")

    answer(args, document, show)
    return DONE


def add(verbs: Any) -> None:
    group = verbs.add_parser(
        "data", help="Make, check or audit data sets.", description="Make, check or audit data sets."
    )
    data_verbs = group.add_subparsers(metavar="VERB", required=True)
    verb = add_verb(data_verbs, "synth", synth, device=False)
    verb.add_argument("dir", type=Path, metavar="DIR", help="folder to make")
    verb.add_argument("--species", type=int, default=8, help="number of species (default: 8)")
    verb.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes (default: 0)")
    verb = add_verb(data_verbs, "check", check, json=True, device=False)
    add_data(verb)
    add_options(verb, without=settings.options().keys() - TABLE_OPTIONS)
    verb.add_argument("--pairs", type=Path, metavar="FILE", help="draw near-duplicates between splits into a JPEG file")
    verb = add_verb(data_verbs, "audit", audit, run=True, data=OWN_DATA, json=True)
    verb.add_argument("--most", type=int, default=30, metavar="N", help="pictures with their sheets (default: 30)")
    verb.add_argument("--out", type=Path, metavar="DIR", help="folder to make (default: RUN/audit)")
    verb.add_argument("--overwrite", action="store_true", help="replace an earlier audit in --out")
