"""What goes wrong with a request, as one sentence and a status."""

from __future__ import annotations

import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from likethat.errors import UserError
from likethat.serve.responses import AsciiJSONResponse


class Problem(BaseModel):
    """One sentence that says what is wrong and how to put it right."""

    detail: str


class Refused(HTTPException):
    """A request that is not served."""

    def __init__(self, status: int, detail: str, retry_after: float | None = None) -> None:
        headers = {} if retry_after is None else {"Retry-After": str(max(1, math.ceil(retry_after)))}
        super().__init__(status, detail, headers)

    def answer(self) -> AsciiJSONResponse:
        return AsciiJSONResponse({"detail": self.detail}, self.status_code, self.headers)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the problems that a route answers with, for the OpenAPI document."""
    return {status: {"model": Problem} for status in statuses}


def add_handlers(app: FastAPI, page: bytes) -> None:
    """Answer errors with JSON; people who follow an address that leads nowhere see `page`, which tells them so."""

    def answer(status: int, detail: str, headers: dict[str, str] | None = None) -> AsciiJSONResponse:
        return AsciiJSONResponse({"detail": detail}, status, headers)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> AsciiJSONResponse:
        return error.answer()

    @app.exception_handler(UserError)
    async def mistake(_: Request, error: UserError) -> AsciiJSONResponse:
        return answer(422, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> AsciiJSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        return answer(422, f"{place or 'The request'}: {first['msg']}.")

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404 and "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(page, 404)
        return answer(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> AsciiJSONResponse:
        return answer(499, "The client went away.")  # nobody reads it; the metrics count it
