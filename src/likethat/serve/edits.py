"""The routes that correct and that search for neighbours. `security.Guard` asks for the token that they need."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, Field

from likethat.serve.corrections import Change
from likethat.serve.problems import Refused
from likethat.serve.responses import AsciiJSONResponse
from likethat.serve.server import Server

Number = Annotated[int, Field(ge=0, le=10_000_000)]
NO_STORE = {"Cache-Control": "no-store"}


class ChangeRequest(BaseModel):
    kind: Literal["ban", "merge", "name", "replace", "undo", "redo"]
    revision: Number = Field(description="that the client has seen")
    prototypes: list[Number] = Field(default=[], max_length=1000)
    text: str = Field("", max_length=1000)
    candidate: Number = 0
    who: str = Field("", max_length=1000)
    why: str = Field("", max_length=10_000)

    def to_change(self) -> Change:
        if self.kind not in ("undo", "redo"):
            if not self.prototypes:
                raise Refused(422, "No prototype was named; name the prototypes to correct.")
            if not self.who.strip():
                raise Refused(422, "Corrections are kept with a name; say who you are.")
        return Change(self.kind, tuple(self.prototypes), self.text, self.candidate, self.who, self.why)


class SaveRequest(BaseModel):
    name: str = Field(max_length=200)
    revision: Number


def edit_routes(server: Server) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    corrections = server.corrections

    @router.get("/api/edit")
    async def state() -> AsciiJSONResponse:
        if corrections.editor is None:  # its thread is reading images
            return AsciiJSONResponse(corrections.document())
        return AsciiJSONResponse(await corrections.do(corrections.document))

    @router.post("/api/edit/open")
    async def open_() -> AsciiJSONResponse:
        corrections.open()
        return AsciiJSONResponse(corrections.work.to_dict(), 202)

    @router.get("/api/atlas")
    async def atlas_state() -> AsciiJSONResponse:
        return AsciiJSONResponse(server.neighbours.work.to_dict())

    @router.post("/api/atlas")
    async def search() -> AsciiJSONResponse:
        server.neighbours.search()
        return AsciiJSONResponse(server.neighbours.work.to_dict(), 202)

    @router.post("/api/edit")
    async def change(asked: ChangeRequest) -> AsciiJSONResponse:
        return AsciiJSONResponse(await corrections.do(corrections.change, asked.to_change(), asked.revision))

    @router.post("/api/edit/save")
    async def save(asked: SaveRequest) -> AsciiJSONResponse:
        return AsciiJSONResponse(await corrections.do(corrections.save, asked.name.strip(), asked.revision), 201)

    @router.get("/api/edit/candidates/{id}")
    async def candidates(id: int) -> AsciiJSONResponse:
        return AsciiJSONResponse(await corrections.do(corrections.candidates, id))

    @router.get("/api/edit/effect/{picture}")
    async def effect(picture: str, name: str | None = None) -> AsciiJSONResponse:
        name = server.class_named(name)
        kept = server.store.get(picture)
        return AsciiJSONResponse(await corrections.do(corrections.effect, kept.prepared, name))

    @router.get("/edit/candidates/{id}/{number}.jpg")
    async def candidate_picture(id: int, number: int) -> Response:
        data = await corrections.do(corrections.candidate_picture, id, number)
        return Response(data, media_type="image/jpeg", headers=NO_STORE)

    @router.get("/edit/prototypes/{id}/{kind}.jpg")
    async def prototype_picture(id: int, kind: Literal["crop", "source"]) -> Response:
        data = await corrections.do(corrections.prototype_picture, id, kind)
        return Response(data, media_type="image/jpeg", headers=NO_STORE)

    return router
