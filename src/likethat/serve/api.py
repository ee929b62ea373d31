"""The routes for programs: explain, prototypes, health and metrics. They are what the OpenAPI document tells of."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import PlainTextResponse

from likethat.explaining.boxes import PERCENTILE
from likethat.explaining.explanation import Options
from likethat.explaining.hiding import MOST_HIDDEN, read_box
from likethat.serve.problems import Refused, documented
from likethat.serve.responses import AsciiJSONResponse
from likethat.serve.schemas import ExplainAnswer, HealthAnswer, OnePrototypeAnswer, PrototypesAnswer
from likethat.serve.server import Server

BINARY = {"schema": {"type": "string", "format": "binary"}}
PICTURE_BODY = {
    "requestBody": {
        "required": True,
        "description": "A picture as it is, or up to 16 of them in the field `file` of a form.",
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"file": {"type": "array", "items": BINARY["schema"], "minItems": 1}},
                    "required": ["file"],
                }
            },
            "image/jpeg": BINARY,
            "image/png": BINARY,
            "application/octet-stream": BINARY,
        },
    }
}
MOST_CLASSES = 1000
HIDE = Query(max_length=MOST_HIDDEN, description="x0,y0,x1,y1: a part to paint over first, in pixels of the picture")


def api_routes(server: Server) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/api/explain",
        openapi_extra=PICTURE_BODY,
        responses={200: {"model": ExplainAnswer}, **documented(400, 403, 408, 413, 422, 503)},
        summary="Why each picture got its class",
    )
    async def explain(
        request: Request,
        top_classes: Annotated[int, Query(ge=1, le=MOST_CLASSES, description="classes explained")] = 3,
        against: Annotated[str | None, Query(description="say why not this class; the runner-up, if none")] = None,
        maps: Annotated[bool, Query(description="with the similarity map of every prototype")] = False,
        percentile: Annotated[float, Query(ge=0, le=100, description="of a map's pixels outside its box")] = PERCENTILE,
        level: Annotated[
            float | None,
            Query(
                gt=0,
                lt=1,
                description="of the prediction sets; if none, the largest of 0.8, 0.9, 0.95 that validation allows",
            ),
        ] = None,
        hide: Annotated[list[str], HIDE] = [],  # noqa: B006  # FastAPI copies it
    ) -> AsciiJSONResponse:
        """Return the same document as `likethat explain --json` prints. Nothing is kept."""
        options = Options(top_classes, server.class_named(against), percentile=percentile, level=level)
        boxes = [read_box(text) for text in hide]
        return AsciiJSONResponse(await server.explain_uploads(request, maps, options, boxes))

    @router.get(
        "/api/prototypes",
        responses={200: {"model": PrototypesAnswer}, **documented(403, 422)},
        summary="All prototypes, or those of a class",
    )
    async def prototypes(
        class_name: Annotated[str | None, Query(alias="class", description="a class's name")] = None,
        search: Annotated[str, Query(max_length=200, description="part of a class's, prototype's or file's name")] = "",
        start: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
        most: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    ) -> AsciiJSONResponse:
        class_name = server.class_named(class_name)
        word, catalogue = search.strip().lower(), server.catalogue
        found = [
            entry
            for entry in await server.pages.take(lambda: catalogue.entries)  # made when first asked for
            if (class_name is None or entry["class"] == class_name)
            and (not word or any(word in str(entry[key] or "").lower() for key in ("class", "name", "path")))
        ]
        shown = found[start : start + most]
        return AsciiJSONResponse({"count": len(found), "atlas": bool(catalogue.atlas), "prototypes": shown})

    @router.get(
        "/api/prototypes/{id}",
        responses={200: {"model": OnePrototypeAnswer}, **documented(403, 404, 422)},
        summary="One prototype with its nearest patches",
    )
    async def prototype(id: Annotated[int, Path(ge=0, le=10_000_000)]) -> AsciiJSONResponse:
        return AsciiJSONResponse({**await find_prototype(server, id), **server.catalogue.neighbours(id)})

    @router.get("/health", responses={200: {"model": HealthAnswer}, **documented(403)}, summary="Whether it answers")
    async def health() -> AsciiJSONResponse:
        return AsciiJSONResponse({"status": "ok"})

    @router.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses=documented(403),
        summary="Counts and times, as Prometheus reads them",
    )
    async def metrics() -> PlainTextResponse:
        gauges = {
            "slots_taken": server.slots.taken,
            "slots": server.slots.most,
            "pictures_waiting": len(server.batcher.waiting),
            "pictures_kept": len(server.store),
            "batches_total": server.batcher.batches,
            "batched_pictures_total": server.batcher.pictures,
        }
        return PlainTextResponse(server.metrics.text(gauges))

    return router


async def find_prototype(server: Server, id: int) -> dict[str, Any]:
    catalogue = server.catalogue
    entry = (await server.pages.take(lambda: catalogue.by_id)).get(id)
    if entry is None:
        raise Refused(404, f"There is no prototype {id}.")
    return entry
