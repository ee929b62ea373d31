"""The routes of the page: its files, the pictures it shows, and what it asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, Response

from likethat.explaining.attribution import TITLES, UPSAMPLING, check_method
from likethat.explaining.boxes import PERCENTILE, SEEN_ALONE
from likethat.explaining.draw.heat import colour_table
from likethat.explaining.draw.page import render_explanation
from likethat.explaining.explanation import Explanation, Options
from likethat.explaining.hiding import MOST_HIDDEN, read_box
from likethat.serve.answers import Question
from likethat.serve.api import find_prototype
from likethat.serve.problems import Refused
from likethat.serve.responses import AsciiJSONResponse
from likethat.serve.server import Server

KINDS = {"css": "text/css", "js": "text/javascript", "html": "text/html", "svg": "image/svg+xml"}
ClassName = Annotated[str | None, Query(alias="class")]
Percentile = Annotated[float, Query(ge=0, le=100)]
Level = Annotated[float | None, Query(gt=0, lt=1)]
Hide = Annotated[list[str], Query(max_length=MOST_HIDDEN)]  # x0,y0,x1,y1 each, in shares of the picture
SHELLS = ("/", "/ask/{id}", "/browse", "/prototypes/{id}", "/correct", "/api")
PATIENCE = 5.0  # seconds to find prototypes in their own pictures; who asks again gets more of them
PICTURE_AGE = {"Cache-Control": "private, max-age=300"}
DOWNLOADS: dict[str, tuple[str, Callable[[Explanation], bytes]]] = {
    "png": ("image/png", lambda explanation: explanation.png()),
    "html": ("text/html; charset=utf-8", render_explanation),
    "json": ("application/json", lambda explanation: json.dumps(explanation.to_dict(), indent=1).encode()),
}


async def question(
    name: ClassName = None,
    against: str | None = None,
    percentile: Percentile = PERCENTILE,
    level: Level = None,
    attribution: str = UPSAMPLING,
    hide: Hide = [],  # noqa: B006  # FastAPI copies it
) -> Question:
    """Read the question from the address."""
    check_method(attribution)
    options = Options(against=against, percentile=percentile, level=level, attribution=attribution, patience=PATIENCE)
    return Question(name, options, tuple(read_box(text) for text in hide))


Asked = Annotated[Question, Depends(question)]


def static_files() -> dict[str, bytes]:
    """Read all files into memory: a name that is not among them has no file, however it is spelt."""
    folder = resources.files("likethat.serve") / "static"
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in KINDS}
    base = resources.files("likethat.explaining.draw") / "templates" / "style.css"
    return {**files, "base.css": base.read_bytes()}


def page_routes(server: Server, files: Mapping[str, bytes]) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    async def shell() -> HTMLResponse:
        return HTMLResponse(files["index.html"])

    for path in SHELLS:
        router.add_api_route(path, shell)

    @router.get("/static/{name}")
    async def static(name: str) -> Response:
        data = files.get(name)
        if data is None:
            raise Refused(404, "There is no such file.")
        return Response(data, media_type=KINDS[name.rpartition(".")[2]], headers={"Cache-Control": "no-cache"})

    @router.get("/api/run")
    async def run() -> AsciiJSONResponse:
        return AsciiJSONResponse(await server.pages.take(run_document, server))

    @router.post("/api/pictures")
    async def ask(request: Request) -> AsciiJSONResponse:
        kept, skipped = await server.keep_uploads(request)
        pictures = [{"id": one.id, "name": one.name, "picture": f"/pictures/{one.id}/picture.jpg"} for one in kept]
        return AsciiJSONResponse({"pictures": pictures, "skipped": [vars(entry) for entry in skipped]}, 201)

    @router.get("/api/pictures/{id}")
    async def asked(request: Request, id: str, asked: Asked) -> AsciiJSONResponse:
        asked = server.with_classes(asked)
        return AsciiJSONResponse(await server.page_answer(request, server.store.get(id), asked))

    @router.get("/api/pictures/{id}/hidden")
    async def hidden(request: Request, id: str, asked: Asked) -> AsciiJSONResponse:
        asked = server.with_classes(asked)
        return AsciiJSONResponse(await server.hidden_answer(request, server.store.get(id), asked))

    @router.get("/pictures/{id}/picture.jpg")
    async def picture(id: str) -> Response:
        return Response(server.store.get(id).picture, media_type="image/jpeg", headers=PICTURE_AGE)

    @router.get("/pictures/{id}/explanation.{kind}")
    async def download(request: Request, id: str, kind: str, asked: Asked) -> Response:
        asked = server.with_classes(asked)
        if kind not in DOWNLOADS:
            raise Refused(404, "An explanation comes as png, html or json.")
        kept = server.store.get(id)
        media_type, form = DOWNLOADS[kind]
        data = await server.download(request, kept, asked, form)
        stem = (kept.name or "picture").rpartition(".")[0] or "picture"
        disposition = f"attachment; filename*=UTF-8''{quote(f'{stem}-explained.{kind}', safe='', errors='replace')}"
        return Response(data, media_type=media_type, headers={"Content-Disposition": disposition})

    @router.get("/prototypes/{id}/{kind}.jpg")
    async def prototype_picture(id: int, kind: str) -> Response:
        await find_prototype(server, id)
        if kind not in ("crop", "source"):
            raise Refused(404, "There is no such picture.")
        return Response(server.catalogue.picture(id, kind), media_type="image/jpeg", headers=PICTURE_AGE)

    @router.get("/atlas/{number}.webp")
    async def atlas_picture(number: int) -> Response:
        return Response(server.catalogue.atlas_picture(number), media_type="image/webp", headers=PICTURE_AGE)

    return router


def run_document(server: Server) -> dict[str, Any]:
    """Return what the page must know before it asks for anything."""
    classifier, limits = server.classifier, server.limits
    counts = dict.fromkeys(classifier.classes, 0)
    for prototype in classifier.prototypes:
        counts[prototype.class_name] += 1
    return {
        "name": classifier.path.resolve().name,
        "backbone": " + ".join(network.backbone.name for network in classifier.networks),
        "classes": [{"name": name, "prototypes": count} for name, count in counts.items()],
        "prototypes": len(classifier.prototypes),
        "limits": {
            "bytes": limits.file_bytes,
            "files": limits.files,
            "minutes": limits.kept_seconds / 60,
            "hidden": MOST_HIDDEN,
        },
        "attributions": TITLES,
        "seen_alone": SEEN_ALONE if classifier.sees_windows else None,
        "colours": [f"#{bytes(rgb).hex()}" for rgb in colour_table()[::15].tolist()],
        "edit_token": server.edit_token,
    }
