"""Pictures that are withdrawn: no prototype is cut from them, no connection rests on them, no pixel of them stays."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from likethat.data.formats import open_by_config
from likethat.errors import UserError
from likethat.progress import Display
from likethat.runs import layout
from likethat.workflows.derived import GONE
from likethat.workflows.edit.editor import Editor
from likethat.workflows.edit.history import (
    MOST_REASONS,
    WITHDRAW,
    Edit,
    clean,
    describe_patch,
    now,
    who_is_there,
)
from likethat.workflows.edit.model import State, Workshop, open_workshop
from likethat.workflows.edit.place import others_in

STILL_LEARNED = (
    "The backbone has still learned from them. What it took from them cannot be taken out again: where that must not "
    "be, train a new run without them."
)


def open_without(
    run: Path,
    paths: Sequence[str],
    data: str | None = None,
    device: str = "auto",
    display: Display | None = None,
    *,
    why: str = "",
    who: str | None = None,
) -> Editor:
    """Open an editor of a finished run from which pictures were withdrawn. That is not undone there: an undo would
    bring their pixels back."""
    gone = find_withdrawn(run, paths, data)
    workshop = open_workshop(run, data, device, display or Display(quiet=True), frozenset(gone))
    try:
        start = workshop.start()
        return Editor(workshop, start, withdraw(workshop, start, gone, why, who))
    except BaseException:
        workshop.scratch.cleanup()
        raise


def find_withdrawn(run: Path, paths: Sequence[str], data: str | None) -> list[str]:
    """Return the pictures that are meant, as the run names them: files, or all that it knows of a folder. Those that
    are no longer on the disk are known from the run's table of images."""
    record = layout.read_record(run)
    dataset = open_by_config(data or record.data.source, record.config)
    known = {sample.path for sample in dataset.all_samples()}
    if (run / layout.IMAGES).is_file():
        with (run / layout.IMAGES).open(newline="", encoding="utf-8") as file:
            known |= {row["image"] for row in csv.DictReader(file)}
    known -= set(record.data.skipped)
    gone: set[str] = set()
    for path in paths:
        names = {Path(path).as_posix()}
        if Path(os.path.abspath(path)).is_relative_to(dataset.root):
            names.add(Path(os.path.abspath(path)).relative_to(dataset.root).as_posix())
        meant = {
            name for name in known for start in names if name == start or name.startswith((f"{start}/", f"{start}#"))
        }
        if not meant:
            raise UserError(
                f"{run} knows no picture {path}; name a file or folder of its data, or a path as in {layout.IMAGES}."
            )
        gone |= meant
    return sorted(gone)


def withdraw(workshop: Workshop, start: State, gone: Sequence[str], why: str, who: str | None) -> State:
    """Return the state in which other patches of their classes have taken the place of all prototypes that were cut
    from these pictures, with a last layer that was solved without them."""
    left = {sample.label for sample in workshop.dataset.train}
    if empty := [name for label, name in enumerate(workshop.original.classes) if label not in left]:
        raise UserError(f"{empty[0]} would have no training picture left; train a new run without the class.")
    network, columns = workshop.original.networks[0], list(start.columns)
    replaced = [number for number, column in enumerate(columns) if column.patch.image == GONE]
    for number in replaced:
        taken = {column.patch for column in columns}
        candidates = workshop.candidates(network, number, taken, 1)
        if not candidates:
            name = columns[number].prototype.class_name
            raise UserError(f"{name} has no other patch left for prototype {number}; ban that first, then withdraw.")
        columns[number] = workshop.cut(candidates[0].patch, columns[number].prototype)
    state = workshop.solve(tuple(columns))
    edit = Edit(
        kind=WITHDRAW,
        prototypes=tuple(start.columns[number].prototype.id for number in replaced),
        patches=tuple(describe_patch(start.columns[number].prototype) for number in replaced),
        name=None,
        new_patch=None,
        who=who_is_there(who),
        when=now(),
        why=clean(why, MOST_REASONS, "a reason"),
        run=str(workshop.original.path.resolve()),
        before=start.val,
        after=state.val,
        withdrawn=tuple(gone),
        new_patches=tuple(describe_patch(columns[number].prototype) for number in replaced),
    )
    return replace(state, edit=edit)


def what_remains(run: Path, out: Path) -> list[str]:
    """Return what must be said about pixels that are still somewhere, before `out` is written."""
    notes = [STILL_LEARNED]
    if out.resolve() != run.resolve():
        notes.append(f"{run} still holds their pixels: remove it, or withdraw them there too (without --out).")
    else:
        ours, others = others_in(run)
        if ours:
            notes.append(f"Removed with them, since they may show them: {', '.join(ours)}; make these again.")
        if others:
            notes.append(f"Left as they were in {run}: {', '.join(others)}; look whether they show them.")
    notes.append(
        "Copies, exports and runs that were made of this run before are not changed; the pictures themselves "
        "are yours to delete."
    )
    return notes
