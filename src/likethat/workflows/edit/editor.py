"""Corrections by a person who knows the subject: what `likethat edit` and the web page do to a finished run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from PIL.Image import Image

from likethat.data.dataset import DataSet, Sample
from likethat.data.decode import Box, read_image, to_input
from likethat.errors import UserError
from likethat.explaining.boxes import patch_box
from likethat.explaining.draw.render import in_shares, seen_part, shrink
from likethat.explaining.gallery import SOURCE_SIDE
from likethat.metrics.accuracy import logits_of
from likethat.progress import Display
from likethat.runs import layout
from likethat.runs.classifier import Classifier, PreparedPicture
from likethat.runs.looks import count_looks
from likethat.training.candidates import Candidate
from likethat.workflows.derived import write_network
from likethat.workflows.edit.history import (
    BAN,
    MERGE,
    MOST_LETTERS,
    MOST_REASONS,
    NAME,
    REPLACE,
    WITHDRAW,
    Edit,
    clean,
    describe_patch,
    now,
    who_is_there,
    write_history,
)
from likethat.workflows.edit.model import Column, State, Workshop, effect_of_edits, open_workshop
from likethat.workflows.edit.place import edited_folder
from likethat.workflows.run_conclusion import conclude

CANDIDATES = 8  # patches offered for a prototype's place


class Editor:
    """A finished run that is being corrected. Made by `open_editor`; used by one thread at a time.

    Every edit solves the last layer again from cached scores. The result depends on the prototypes that are left, not
    on the way there: undone and redone, or in another order, the same edits give the same numbers.
    """

    def __init__(self, workshop: Workshop, *states: State) -> None:
        """Begin with the run as it is, or with states that it has been brought to already."""
        self._workshop = workshop
        self._states = list(states) or [workshop.start()]
        self._position = len(self._states) - 1
        self._looks = count_looks(layout.read_metrics(self.original.path))  # at test images, in all that was saved too
        self._classifiers = {0: workshop.original}  # by position

    def __enter__(self) -> Editor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the pictures of prototypes that were not saved."""
        self._workshop.scratch.cleanup()

    @property
    def original(self) -> Classifier:
        return self._workshop.original

    @property
    def scratch(self) -> Path:
        """Return the folder of new prototypes' pictures until they are saved."""
        return Path(self._workshop.scratch.name)

    @property
    def dataset(self) -> DataSet:
        return self._workshop.dataset

    @property
    def start(self) -> State:
        """Return the state of the run as it was opened."""
        return self._states[0]

    @property
    def state(self) -> State:
        return self._states[self._position]

    @property
    def history(self) -> list[Edit]:
        """Return the edits in force, oldest first."""
        return [state.edit for state in self._states[: self._position + 1] if state.edit]

    @property
    def undone(self) -> list[Edit]:
        """Return the edits that `redo` brings back, next first."""
        return [state.edit for state in self._states[self._position + 1 :] if state.edit]

    @property
    def classifier(self) -> Classifier:
        """Return the model as it is now, to predict and explain with; prototypes keep the opened run's numbers."""
        if self._position not in self._classifiers:
            self._classifiers[self._position] = self._workshop.classifier(self.state)
        return self._classifiers[self._position]

    def ban(self, prototypes: int | Sequence[int], *, why: str = "", who: str | None = None) -> Edit:
        """Take prototypes out of the model."""
        numbers = _numbers(prototypes, "Banning")
        return self._remove(BAN, numbers, numbers, why, who)

    def merge(self, prototypes: Sequence[int], *, why: str = "", who: str | None = None) -> Edit:
        """Merge prototypes of one class that mean the same: the first one stays, with the first name of them all."""
        numbers = list(dict.fromkeys(prototypes))
        if len(numbers) < 2:
            raise UserError("Merging takes two prototypes or more; name at least two different ones.")
        columns = [self._column(number) for number in numbers]
        classes = {column.prototype.class_name: column.prototype.id for column in columns}
        if len(classes) > 1:
            told = " and ".join(f"{number} is of {name}" for name, number in list(classes.items())[:2])
            raise UserError(f"Only prototypes of one class can be merged: {told}; ban those that are not wanted.")
        name = next((column.prototype.name for column in columns if column.prototype.name), None)
        return self._remove(MERGE, numbers, numbers[1:], why, who, name=name)

    def name(self, prototypes: int | Sequence[int], text: str, *, why: str = "", who: str | None = None) -> Edit:
        """Name prototypes on pages, on pictures and in JSON documents; an empty text takes their name away."""
        numbers, name = _numbers(prototypes, "Naming"), clean(text, MOST_LETTERS, "a name") or None
        columns = self.state.columns
        for number in numbers:
            self._column(number)  # tells of a number that there is none of
            columns = _named(columns, number, name)
        # No number of the model changes.
        return self._enter(replace(self.state, columns=columns), NAME, numbers, why, who, name=name)

    def candidates(self, prototype: int, count: int = CANDIDATES) -> tuple[Candidate, ...]:
        """Return other patches of the prototype's class, those first that set the class apart best. Patches that were
        prototypes at any time since the run was opened are not offered."""
        number = self.state.columns.index(self._column(prototype))
        taken = {column.patch for state in self._states for column in state.columns}
        return self._workshop.candidates(self.classifier.networks[0], number, taken, count)

    def sample(self, candidate: Candidate) -> Sample:
        return self.dataset.train[candidate.patch.image]

    def picture(self, candidate: Candidate) -> tuple[Image, Box]:
        """Return what the network saw of the candidate's picture, and the candidate's place in shares of it."""
        sample, network, patch = self.sample(candidate), self.original.networks[0], candidate.patch
        upright = read_image(self.dataset.root / sample.path, value_range=sample.value_range)
        _, view = to_input(upright, sample.box, (1, 1))
        height, width = network.backbone.input_size
        share = in_shares(patch_box(network, patch.row, patch.column), width, height)
        return shrink(seen_part(upright, view), SOURCE_SIDE), share

    def replace(self, prototype: int, candidate: Candidate, *, why: str = "", who: str | None = None) -> Edit:
        """Put another patch of the class in the prototype's place, with its number but without its name."""
        old = self._column(prototype)
        if self.sample(candidate).label != old.prototype.label:
            raise UserError(f"The patch is of another class than prototype {prototype}; choose one of its candidates.")
        if any(column.patch == candidate.patch for column in self.state.columns):
            raise UserError(f"The patch for prototype {prototype} is a prototype already; choose another candidate.")
        fresh = self._workshop.cut(candidate.patch, old.prototype)
        columns = tuple(fresh if column is old else column for column in self.state.columns)
        return self._enter(
            self._workshop.solve(columns), REPLACE, [prototype], why, who, new_patch=describe_patch(fresh.prototype)
        )

    def effect(self, picture: PreparedPicture, class_name: str | None = None) -> dict[str, Any]:
        """Return what the edits in force change for one picture, see `effect_of_edits`."""
        return effect_of_edits(self.original, self.classifier, picture, class_name)

    def undo(self) -> Edit:
        """Take the last edit back, and return it."""
        if (edit := self.state.edit) is None:
            raise UserError("There is no edit to undo.")
        if edit.kind == WITHDRAW:
            raise UserError("A withdrawal is not undone, since its pictures are gone from here; open the run again.")
        self._position -= 1
        return edit

    def redo(self) -> Edit:
        """Bring back the edit that was undone last."""
        if not self.undone:
            raise UserError("There is no edit to redo.")
        self._position += 1
        edit = self.state.edit
        assert edit is not None
        return edit

    def save(self, out: str | Path, *, overwrite: bool = False, display: Display | None = None) -> dict[str, Any]:
        """Write the corrected model as a run of its own; after a withdrawal `out` may be the run itself, which it then
        takes the place of. Test images judge it."""
        out, run = Path(out), self.original.path
        if not self.history:
            raise UserError("Nothing was edited, so there is nothing to save; ban, merge, name or replace a prototype.")
        withdrawn = self.history[0].kind == WITHDRAW
        record, weight_KP, classifier = self._workshop.record, self.state.weight_KP, self.classifier
        network, prototypes = classifier.networks[0], classifier.prototypes
        with edited_folder(run, out, overwrite=overwrite, withdrawn=withdrawn) as target:
            class_P = network.prototype_layer.class_P
            write_network(target, record, network, torch.arange(len(class_P)), class_P, weight_KP, prototypes, run)
            write_history(target, layout.read_edits(run), self.history)
            logits_NK = logits_of(classifier, self.dataset.root, self.dataset.test, display or Display(quiet=True))
            val_NK = self._workshop.validation_logits(self.state.columns, weight_KP)
            metrics = [*layout.read_metrics(run), line := self._line()]
            evaluation = conclude(target, metrics, self.dataset, logits_NK, val_NK, self._looks)
        self._looks += 1
        line["test"] = {**evaluation.to_dict(), "looks": self._looks}
        return {**line, "edits": [edit.to_dict() for edit in self.history]}

    def _line(self) -> dict[str, Any]:
        """Return the line of metrics.jsonl about the edits."""
        state, own_KP = self.state, self.classifier.networks[0].own_KP
        kinds = [edit.kind for edit in self.history]
        return {
            "stage": "edit",
            "from": str(self.original.path.resolve()),
            "edits": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
            "prototypes": len(state.columns),
            "connections": int((state.weight_KP != 0).sum()),
            "nonzero_negative": int(((state.weight_KP != 0) & ~own_KP).sum()),
            "kkt_residual": state.kkt_residual,
            "before": self.start.val,
            "after": state.val,
        }

    def _column(self, number: int) -> Column:
        """Return the prototype of that number, if it is in the model."""
        found = next((column for column in self.state.columns if column.prototype.id == number), None)
        if found is not None:
            return found
        if 0 <= number < len(self.original.prototypes):
            raise UserError(f"Prototype {number} was removed by an earlier edit; undo that first.")
        raise UserError(f"There is no prototype {number}; they are numbered 0 to {len(self.original.prototypes) - 1}.")

    def _remove(
        self,
        kind: str,
        numbers: Sequence[int],
        gone: Sequence[int],
        why: str,
        who: str | None,
        *,
        name: str | None = None,
    ) -> Edit:
        removed = {self._column(number) for number in gone}
        columns = tuple(column for column in self.state.columns if column not in removed)
        if name is not None:
            columns = _named(columns, numbers[0], name)
        left = {column.prototype.class_name for column in columns}
        if empty := [name for name in self.original.classes if name not in left]:
            raise UserError(
                f"{empty[0]} would lose its last prototype, and nothing would speak for it; keep one, or replace it by "
                "another patch of the class."
            )
        return self._enter(self._workshop.solve(columns), kind, numbers, why, who, name=name)

    def _enter(
        self,
        state: State,
        kind: str,
        numbers: Sequence[int],
        why: str,
        who: str | None,
        *,
        name: str | None = None,
        new_patch: dict[str, Any] | None = None,
    ) -> Edit:
        """Make `state` the current one; undone edits can no longer be redone."""
        edit = Edit(
            kind=kind,
            prototypes=tuple(numbers),
            patches=tuple(describe_patch(self._column(number).prototype) for number in numbers),
            name=name,
            new_patch=new_patch,
            who=who_is_there(who),
            when=now(),
            why=clean(why, MOST_REASONS, "a reason"),
            run=str(self.original.path.resolve()),
            before=self.state.val,
            after=state.val,
        )
        self._states[self._position + 1 :] = [replace(state, edit=edit)]
        self._position += 1
        self._classifiers = {
            position: built for position, built in self._classifiers.items() if position < self._position
        }
        return edit


def _numbers(prototypes: int | Sequence[int], what: str) -> list[int]:
    """Return each number once."""
    numbers = [prototypes] if isinstance(prototypes, int) else list(dict.fromkeys(prototypes))
    if not numbers:
        raise UserError(f"{what} takes a prototype or more; name at least one.")
    return numbers


def _named(columns: Sequence[Column], number: int, name: str | None) -> tuple[Column, ...]:
    return tuple(
        replace(column, prototype=replace(column.prototype, name=name)) if column.prototype.id == number else column
        for column in columns
    )


def open_editor(
    run: str | Path, data: str | None = None, device: str = "auto", display: Display | None = None
) -> Editor:
    """Open an editor of a finished run. `data` is where its images lie, if not where they were at training."""
    return Editor(open_workshop(Path(run), data, device, display or Display(quiet=True)))
