"""`likethat edit`: corrections by a person who knows the subject."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from likethat.cli.arguments import DONE, OWN_DATA, add_out, add_verb, answer, display_of
from likethat.errors import UserError

if TYPE_CHECKING:
    from likethat.training.candidates import Candidate
    from likethat.workflows.edit.editor import Editor
    from likethat.workflows.edit.history import Edit


def edit(args: argparse.Namespace) -> int:
    """Ban, merge, name or replace prototypes, or withdraw pictures; solve the last layer again and write the run."""
    from likethat.cli.tables import print_candidates, print_edits
    from likethat.workflows.edit.editor import open_editor
    from likethat.workflows.edit.place import check_out
    from likethat.workflows.edit.withdraw import open_without, what_remains

    if args.candidates is not None:
        if args.edits or args.without or args.out is not None:
            raise UserError("--candidates only lists patches; edit with another command.")
        with open_editor(args.run, args.data, args.device, display_of(args)) as editor:
            found = describe_candidates(editor, args.candidates)
        answer(args, {"prototype": args.candidates, "candidates": found}, lambda: print_candidates(found))
        return DONE
    if not args.edits and not args.without:
        raise UserError("Nothing to edit was named; pass --ban, --merge, --name, --replace or --without.")
    if args.out is None and args.edits:
        raise UserError("The corrected model becomes a run of its own; say where with --out RUN.")
    out = args.out or args.run  # what is withdrawn leaves the run itself
    if args.out is not None:
        check_out(args.run, args.out, overwrite=args.overwrite)
    opened = (args.data, args.device, display_of(args))
    reasons = {"why": args.why, "who": args.who}
    notes = what_remains(args.run, out) if args.without else []
    with (
        open_without(args.run, args.without, *opened, **reasons) if args.without else open_editor(args.run, *opened)
    ) as editor:
        # Candidates are those that --candidates lists, whatever edits come before.
        chosen = [choose(editor, values) if kind == "replace" else None for kind, values in args.edits]
        for (kind, values), candidate in zip(args.edits, chosen, strict=True):
            apply(editor, kind, values, candidate, **reasons)
        edits = editor.history
        saved = editor.save(out, overwrite=args.overwrite, display=display_of(args))

    def show() -> None:
        print_edits(edits, saved, out)
        for note in notes:
            print(note)

    answer(args, {**saved, "notes": notes} if notes else saved, show)
    return DONE


def apply(
    editor: Editor, kind: str, values: Sequence[str], candidate: Candidate | None, *, why: str, who: str | None
) -> Edit:
    """Apply one edit, as its flag of the command line gives it."""
    if kind == "name":
        number, text = values
        return editor.name(_number(number), text, why=why, who=who)
    numbers = [_number(value) for value in values]
    if kind == "ban":
        return editor.ban(numbers, why=why, who=who)
    if kind == "merge":
        return editor.merge(numbers, why=why, who=who)
    assert candidate is not None
    return editor.replace(numbers[0], candidate, why=why, who=who)


def choose(editor: Editor, values: Sequence[str]) -> Candidate:
    """Return the candidate that --replace means."""
    if len(values) > 2:
        raise UserError("--replace takes a prototype and, if not the first is wanted, the number of a candidate.")
    prototype, chosen = ([_number(value) for value in values] + [0])[:2]
    candidates = editor.candidates(prototype)
    if not 0 <= chosen < len(candidates):
        raise UserError(
            f"There are {len(candidates)} candidates for the place of prototype {prototype}, numbered from 0; "
            f"`--candidates {prototype}` lists them."
        )
    return candidates[chosen]


def describe_candidates(editor: Editor, prototype: int) -> list[dict[str, Any]]:
    return [
        {
            "candidate": number,
            "path": editor.sample(candidate).path,
            "row": candidate.patch.row,
            "column": candidate.patch.column,
            "similarity": candidate.similarity,
            "own": candidate.own,
            "other": candidate.other,
            "other_class": editor.original.classes[candidate.other_label],
        }
        for number, candidate in enumerate(editor.candidates(prototype))
    ]


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise UserError(f"Prototypes and candidates are named by their numbers, and '{text}' is none.") from error


class _Append(argparse.Action):
    """Keeps edits of all kinds in the order in which they stand on the command line."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.edits = [*namespace.edits, (self.dest, values)]


def add(verbs: Any) -> None:
    verb = add_verb(verbs, "edit", edit, run=True, data=OWN_DATA, json=True)
    verb.set_defaults(edits=[])
    edits: dict[str, Any] = {"action": _Append, "default": argparse.SUPPRESS}
    verb.add_argument("--ban", nargs="+", metavar="P", help="prototypes to take out", **edits)
    verb.add_argument("--merge", nargs="+", metavar="P", help="duplicates to merge into the first", **edits)
    verb.add_argument("--name", nargs=2, metavar=("P", "TEXT"), help="prototype and its new name", **edits)
    text = "put another patch of the class in its place: the first candidate, or the one of that number"
    verb.add_argument("--replace", nargs="+", metavar=("P", "CANDIDATE"), help=text, **edits)
    text = (
        "pictures or folders to withdraw from the run itself, or into --out: their pixels go, and prototypes cut from"
    )
    verb.add_argument("--without", nargs="+", default=[], metavar="PATH", help=f"{text} them are replaced")
    verb.add_argument("--candidates", type=int, metavar="P", help="only list the patches that could replace P")
    verb.add_argument("--why", default="", metavar="TEXT", help="reason, which the run's history keeps")
    verb.add_argument("--who", metavar="NAME", help="who edits (default: the user's name)")
    add_out(verb, required=False)
