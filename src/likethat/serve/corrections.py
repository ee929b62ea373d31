"""Corrections of the served run: one editor for all who look, opened when the first one wants to correct."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field

from likethat.explaining.draw.render import jpeg
from likethat.progress import Display
from likethat.runs.classifier import PreparedPicture
from likethat.runs.looks import nth_time
from likethat.serve.catalogue import Catalogue
from likethat.serve.neighbours import Neighbours
from likethat.serve.problems import Refused
from likethat.serve.work import DONE, Work
from likethat.training.candidates import Candidate
from likethat.workflows.edit.editor import Editor, open_editor
from likethat.workflows.edit.history import read_history

T = TypeVar("T")
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,62}[A-Za-z0-9]")


Number = Annotated[int, Field(ge=0, le=10_000_000)]


class Change(BaseModel):
    """What somebody wants to be different."""

    kind: Literal["ban", "merge", "name", "replace", "undo", "redo"]
    revision: Number = Field(description="that the client has seen")
    prototypes: list[Number] = Field(default=[], max_length=1000)
    text: str = Field("", max_length=1000)  # the name
    candidate: Number = 0
    who: str = Field("", max_length=1000)
    why: str = Field("", max_length=10_000)

    def check(self) -> None:
        """Refuse a change of nothing, or by nobody."""
        if self.kind not in ("undo", "redo"):
            if not self.prototypes:
                raise Refused(422, "No prototype was named; name the prototypes to correct.")
            if not self.who.strip():
                raise Refused(422, "Corrections are kept with a name; say who you are.")


@dataclass(eq=False)
class Corrections:
    """All work goes through one thread: the editor is made for one, and edits come after one another."""

    neighbours: Neighbours
    device: str
    revision: int = 0  # rises with every change; who has seen an older one must look again first
    editor: Editor | None = None
    catalogue: Catalogue | None = None
    work: Work = field(default_factory=Work)
    saved: list[dict[str, Any]] = field(default_factory=list)
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "editor"))
    _candidates: dict[int, tuple[Candidate, ...]] = field(default_factory=dict)  # by prototype, of this revision

    @property
    def run(self) -> Path:
        return self.neighbours.classifier.path

    async def do(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *arguments)

    def open(self) -> None:
        """Start reading the images, unless that was done."""
        self.work.start(self.thread, self._open)

    def _open(self, display: Display) -> None:
        self.editor = open_editor(self.run, self.neighbours.data, self.device, display)
        self._refresh()

    def close(self) -> None:
        self.work.stop()
        self.thread.shutdown(wait=True, cancel_futures=True)
        if self.editor:
            self.editor.close()

    def document(self) -> dict[str, Any]:
        """Return all that the page of corrections shows."""
        head = {**self.work.to_dict(), "revision": self.revision, "saved": self.saved}
        if self.editor is None or self.catalogue is None:
            return head
        editor = self.editor
        earlier = [{**edit.to_dict(), "text": str(edit)} for edit in read_history(self.run)]
        return {
            **head,
            "before": editor.start.val,
            "after": editor.state.val,
            "images": len(editor.dataset.val),
            "history": [{**edit.to_dict(), "text": str(edit)} for edit in editor.history],
            "undone": [{**edit.to_dict(), "text": str(edit)} for edit in editor.undone],
            "earlier": earlier,
            "prototypes": self.catalogue.entries,
        }

    def change(self, change: Change) -> dict[str, Any]:
        editor = self._at(change.revision)
        reasons: dict[str, Any] = {"why": change.why, "who": change.who}
        match change.kind:
            case "undo":
                editor.undo()
            case "redo":
                editor.redo()
            case "ban":
                editor.ban(change.prototypes, **reasons)
            case "merge":
                editor.merge(change.prototypes, **reasons)
            case "name":
                editor.name(change.prototypes, change.text, **reasons)
            case "replace":
                if len(change.prototypes) > 1:
                    raise Refused(422, "One prototype at a time is replaced; name one.")
                candidate = self._candidate(change.prototypes[0], change.candidate)
                editor.replace(change.prototypes[0], candidate, **reasons)
        self.revision += 1
        self._refresh()
        return self.document()

    def candidates(self, prototype: int) -> list[dict[str, Any]]:
        """Return other patches of the class, with the addresses of their pictures."""
        editor = self._open_editor()
        if prototype not in self._candidates:
            self._candidates[prototype] = editor.candidates(prototype)
        return [
            {
                "candidate": number,
                "path": editor.sample(candidate).path,
                "own": candidate.own,
                "other": candidate.other,
                "other_class": editor.original.classes[candidate.other_label],
                "picture": f"/edit/candidates/{prototype}/{number}.jpg?v={self.revision}",
                "share": editor.picture(candidate)[1],
            }
            for number, candidate in enumerate(self._candidates[prototype])
        ]

    def candidate_picture(self, prototype: int, number: int) -> bytes:
        return jpeg(self._open_editor().picture(self._candidate(prototype, number))[0])

    def prototype_picture(self, id: int, kind: str) -> bytes:
        self._open_editor()
        assert self.catalogue is not None
        if id not in self.catalogue.by_id:
            raise Refused(404, f"There is no prototype {id}.")
        return self.catalogue.picture(id, kind)

    def effect(self, picture: PreparedPicture, class_name: str | None) -> dict[str, Any]:
        """Return what the edits change for one picture."""
        return self._open_editor().effect(picture, class_name)

    def save(self, name: str, revision: int) -> dict[str, Any]:
        """Write a new run beside the served one."""
        if not RUN_NAME.fullmatch(name):
            raise Refused(422, "A run's name has 2 to 64 letters, digits, spaces, dots, hyphens and underscores.")
        editor = self._at(revision)
        out = self.run.resolve().parent / name
        if out.exists():
            raise Refused(409, f"There is already something called {name} beside the run; choose another name.")
        line = editor.save(out)
        test = line["test"]
        entry = {"name": name, "path": str(out), "test": test["accuracy"], "images": test["images"]}
        entry["time"] = nth_time(test["looks"])
        entry["command"] = shlex.join(["likethat", "serve", str(out)])
        self.saved.append(entry)
        return entry

    def _open_editor(self) -> Editor:
        if self.editor is None or self.work.state != DONE:
            raise Refused(409, "The run has not been opened for corrections; open it first.")
        return self.editor

    def _at(self, revision: int) -> Editor:
        editor = self._open_editor()
        if revision != self.revision:
            raise Refused(409, "Somebody else has corrected meanwhile; look at what changed, and do it again.")
        return editor

    def _candidate(self, prototype: int, number: int) -> Candidate:
        self.candidates(prototype)
        found = self._candidates[prototype]
        if not 0 <= number < len(found):
            raise Refused(404, f"There is no candidate {number} for prototype {prototype}.")
        return found[number]

    def _refresh(self) -> None:
        editor = self.editor
        assert editor is not None
        self._candidates = {}
        known = self.neighbours.catalogue
        places: dict[str, Any] = {"address": "/edit/prototypes", "version": self.revision, "scratch": editor.scratch}
        self.catalogue = Catalogue(editor.classifier, known.atlas, known.atlas_folder, **places)
