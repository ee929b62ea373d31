"""What the routes share: the model with its queue, the pictures in memory, and how a request becomes an answer."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import Request

from likethat.data.decode import Box, ImageError
from likethat.data.pictures import Skipped
from likethat.explaining.draw.render import jpeg
from likethat.explaining.explanation import Explanation, Options
from likethat.explaining.hiding import hide_boxes, hide_shares
from likethat.runs.classifier import Classifier, PreparedPicture
from likethat.serve.answers import Question, explained, hidden_document, page_document, ranking
from likethat.serve.batching import Batcher, Slots, Turns, unless_gone
from likethat.serve.catalogue import Catalogue
from likethat.serve.corrections import Corrections
from likethat.serve.limits import Limits
from likethat.serve.metrics import Metrics
from likethat.serve.neighbours import Neighbours
from likethat.serve.problems import Refused
from likethat.serve.store import Kept, Store
from likethat.serve.uploads import Upload, prepare_upload, read_uploads, status_of

T = TypeVar("T")
SURROGATE = re.compile("[\ud800-\udfff]")
THREADS = 2  # for each kind of work; few, because a decoded photograph is large


@dataclass(eq=False)
class Server:
    classifier: Classifier
    limits: Limits
    neighbours: Neighbours
    corrections: Corrections
    store: Store = field(init=False)
    slots: Slots = field(init=False)
    batcher: Batcher = field(init=False)
    metrics: Metrics = field(default_factory=Metrics)
    decoding: Turns = field(init=False)
    drawing: Turns = field(init=False)
    pages: Turns = field(init=False)  # what neither decodes nor draws, so that it never waits for those that do
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    edit_token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def __post_init__(self) -> None:
        self.store = Store(self.limits)
        self.slots = Slots(self.limits.waiting)
        self.batcher = Batcher(self.classifier, self.limits.batch, self.limits.answer_seconds)
        kinds = ("decoding", "drawing", "pages")
        self.decoding, self.drawing, self.pages = (Turns(THREADS, kind, self.limits.answer_seconds) for kind in kinds)

    @property
    def catalogue(self) -> Catalogue:
        return self.neighbours.catalogue

    def class_named(self, name: str | None) -> str | None:
        """Return the class that an address names. Addresses have U+FFFD for what is not valid Unicode in a name."""
        if name is None or name in self.classifier.classes:
            return name
        written_so = [own for own in self.classifier.classes if SURROGATE.sub("\ufffd", own) == name]
        if len(written_so) == 1:
            return written_so[0]
        found = "Several classes are" if written_so else "There is no class"
        raise Refused(422, f"{found} called '{name}'; GET /api/run lists them.")

    def with_classes(self, question: Question) -> Question:
        options = replace(question.options, against=self.class_named(question.options.against))
        return replace(question, name=self.class_named(question.name), options=options)

    async def explain_uploads(
        self, request: Request, maps: bool, options: Options, hide: Sequence[Box]
    ) -> dict[str, Any]:
        """Return the document that `likethat explain --json` prints, of the pictures in a request."""

        def prepare(upload: Upload) -> PreparedPicture:
            return hide_boxes(prepare_upload(self.classifier, upload, self.limits), hide)

        async def one(upload: Upload) -> dict[str, Any]:
            prepared = await self.decoding.take(prepare, upload)
            outputs = await self.batcher.outputs(prepared)

            def answer() -> dict[str, Any]:
                explanation = explained(self.classifier, outputs, prepared, upload.name, options)
                return {**explanation.to_dict(maps), "sheet": None}

            return await self.drawing.take(answer)

        images, skipped = await self._of_uploads(request, one)
        return {"images": images, "skipped": [vars(entry) for entry in skipped]}

    async def keep_uploads(self, request: Request) -> tuple[list[Kept], list[Skipped]]:
        """Keep the pictures of a request, so that they have pages."""

        def prepare(upload: Upload) -> tuple[PreparedPicture, bytes]:
            prepared = prepare_upload(self.classifier, upload, self.limits)
            return prepared, jpeg(prepared.image, quality=92)

        async def one(upload: Upload) -> Kept:
            return self.store.add(upload.name, *await self.decoding.take(prepare, upload))

        return await self._of_uploads(request, one)

    async def _of_uploads(
        self, request: Request, one: Callable[[Upload], Awaitable[T]]
    ) -> tuple[list[T], list[Skipped]]:
        """Return an answer for every picture that can be read. Where none can, refuse the request."""

        async def guarded(upload: Upload) -> T | ImageError:
            try:
                return await one(upload)
            except ImageError as error:
                return error

        async def work(uploads: list[Upload]) -> list[T | ImageError]:
            return await asyncio.gather(*map(guarded, uploads))

        with self.slots.one():
            uploads = await read_uploads(request, self.limits)
            found = await unless_gone(request, work(uploads))
        good = [answer for answer in found if not isinstance(answer, ImageError)]
        bad = [answer for answer in found if isinstance(answer, ImageError)]
        if not good:
            raise Refused(status_of(bad[0]), str(bad[0]))
        return good, [Skipped(error.name, error.cause) for error in bad]

    async def page_answer(self, request: Request, kept: Kept, question: Question) -> dict[str, Any]:
        """Return what the page shows of a kept picture."""

        async def work() -> dict[str, Any]:
            outputs = await self.batcher.outputs(kept.prepared)

            def answer() -> dict[str, Any]:
                ranked = ranking(self.classifier, outputs)
                classes = question.classes([row["name"] for row in ranked])
                options = replace(question.options, top_classes=1, against=None, also=classes)
                explanation = explained(self.classifier, outputs, kept.with_image(), kept.name, options)
                return page_document(explanation, kept, ranked, classes, self.catalogue)

            return await self.drawing.take(answer)

        with self.slots.one():
            return await unless_gone(request, work())

    async def hidden_answer(self, request: Request, kept: Kept, question: Question) -> dict[str, Any]:
        """Return what becomes of a kept picture's points when parts of it are hidden."""

        async def work() -> dict[str, Any]:
            prepared = await self.decoding.take(hide_shares, kept.prepared, question.hide)
            outputs = await self.batcher.outputs(prepared)

            def answer() -> dict[str, Any]:
                ranked = ranking(self.classifier, outputs)
                classes = question.classes([row["name"] for row in ranked])
                options = replace(question.options, top_classes=1, against=None, also=classes)
                explanation = explained(self.classifier, outputs, prepared, kept.name, options)
                return hidden_document(explanation, prepared, ranked, classes)

            return await self.drawing.take(answer)

        with self.slots.one():
            return await unless_gone(request, work())

    async def download(
        self, request: Request, kept: Kept, question: Question, form: Callable[[Explanation], bytes]
    ) -> bytes:
        """Return a kept picture's explanation as a file."""

        async def work() -> bytes:
            prepared = await self.decoding.take(lambda: hide_shares(kept.with_image(), question.hide))
            outputs = await self.batcher.outputs(prepared)

            def answer() -> bytes:
                options = replace(question.options, also=[question.name] if question.name else [])
                return form(explained(self.classifier, outputs, prepared, kept.name, options))

            return await self.drawing.take(answer)

        with self.slots.one():
            return await unless_gone(request, work())
