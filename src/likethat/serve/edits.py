"""The routes that correct and that search for neighbours. `security.Guard` asks for the token that they need."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, Field

from likethat.serve.corrections import Change, Number
from likethat.serve.responses import AsciiJSONResponse
from likethat.serve.server import Server

NO_STORE = {"Cache-Control": "no-store"}


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
    async def change(asked: Change) -> AsciiJSONResponse:
        asked.check()
        return AsciiJSONResponse(await corrections.do(corrections.change, asked))

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
