"""Who may ask what: host, origin, tokens, size and time of every request are checked here, before anything is read of
it; and what every answer forbids."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import html
import logging
import re
import secrets
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from likethat.serve.limits import Limits
from likethat.serve.problems import Refused
from likethat.serve.responses import AsciiJSONResponse

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
HOST = re.compile(r"([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\.?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
COOKIE = "likethat"
EDIT_HEADER = "x-likethat-edit"
EDITS, UPLOADS = ("/api/edit", "/api/atlas"), frozenset({"/api/explain", "/api/pictures"})
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
LOGIN, OPEN = "/login", frozenset({"/health", "/static/base.css", "/static/app.css", "/static/icon.svg"})
LOGIN_BYTES = 4096

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with none at all, browsers hide the origin of the login form too
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


class Guard:
    """Stands before the whole application.

    On a loopback address only loopback names are answered to, so that a page elsewhere cannot reach the server by
    pointing a name of its own at it. Requests that come from pages of other origins may not change or upload anything.
    With a token, every request must bring it: as a bearer token, or as the cookie that the login sets. Corrections need
    a token that only this server's pages know. Bodies are limited in size and time. When the server stops, what is not
    answered soon is refused.
    """

    def __init__(
        self, app: ASGIApp, *, token: str | None, edit_token: str, limits: Limits, stopping: asyncio.Event
    ) -> None:
        self.app, self.token, self.edit_token = app, token, edit_token
        self.limits, self.stopping = limits, stopping
        self.cookie = hashlib.sha256(f"cookie {token}".encode()).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        started = False

        async def with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        async def answer() -> None:
            limited = self._limited(scope, receive)
            refusal = await self._refusal(scope, limited)
            await (refusal or self.app)(scope, limited, with_headers)

        try:
            await self._until_stopped(asyncio.ensure_future(answer()), lambda: started)
        except Refused as refused:
            await refused.answer()(scope, receive, with_headers)
        except Exception:
            logging.getLogger(__name__).exception("%s %s", scope["method"], scope["path"])
            if started:
                raise
            await _refused(500, "The server made a mistake; its log says which.")(scope, receive, with_headers)

    async def _until_stopped(self, task: asyncio.Future[None], is_started: Callable[[], bool]) -> None:
        """Wait for an answer; once the server stops, only a little longer for one that has not begun."""
        stopping = asyncio.ensure_future(self.stopping.wait())
        try:
            either: set[asyncio.Future[Any]] = {task, stopping}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=self.limits.drain_seconds)
            if not task.done() and not is_started():
                task.cancel()
                await asyncio.wait({task})
            if task.cancelled():
                raise Refused(503, "The server is stopping; try again in a moment.", 5)
            await task
        finally:
            stopping.cancel()
            task.cancel()

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """Receive a body of limited size within limited time."""
        most = self.limits.request_bytes if scope["path"] in UPLOADS else self.limits.text_bytes
        seconds, total, is_whole = self.limits.upload_seconds, 0, False
        end = asyncio.get_running_loop().time() + seconds
        too_much = Refused(413, f"At most {most / 1e6:g} MB are taken at once; send less.")
        announced = Headers(scope=scope).get("content-length", "")
        is_too_long = announced.isdecimal() and (len(announced) > 18 or int(announced) > most)

        async def limited() -> Message:
            nonlocal total, is_whole
            if is_whole:  # from here on it only tells that the client has left
                return await receive()
            if is_too_long:
                raise too_much
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError as error:
                raise Refused(408, f"The request did not arrive within {seconds:g} seconds.") from error
            total += len(message.get("body", b""))
            if total > most:
                raise too_much
            is_whole = not message.get("more_body", False)
            return message

        return limited

    async def _refusal(self, scope: Scope, receive: Receive) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        name = HOST.fullmatch(host)
        if self.token is not None and name is None:
            return _refused(400, "The Host header names no host; use the server's address.")
        if self.token is None and (name is None or name[1].lower() not in LOOPBACK):
            return _refused(403, "This server answers to localhost only; use its address as it was printed.")
        if scope["method"] not in SAFE and not _same_origin(headers, host):
            return _refused(403, "Pages of other sites may not send anything here.")
        if self.token is None:
            return self._edit_refusal(scope, headers)
        if scope["path"] == LOGIN and scope["method"] == "POST":
            return await self._log_in(receive)
        if self._knows_token(headers) or scope["path"] in OPEN:
            return self._edit_refusal(scope, headers)
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = query.pop("token", [""])[0]
        rest = urlencode(query, doseq=True)
        address = f"{scope['path']}?{rest}" if rest else scope["path"]
        if self._is_token(given):
            # At once to the address without the token, which should not stay in histories.
            return self._let_in(address)
        if scope["path"].startswith("/api/") or scope["path"] in ("/metrics", "/openapi.json"):
            response = _refused(401, "A token is needed: send the header 'Authorization: Bearer TOKEN'.")
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        return login_page(address, wrong=bool(given))

    def _edit_refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if scope["method"] in SAFE or not scope["path"].startswith(EDITS):
            return None
        if _equal(headers.get(EDIT_HEADER, ""), self.edit_token):
            return None
        return _refused(403, f"Corrections need the header {EDIT_HEADER} with the edit_token of GET /api/run.")

    async def _log_in(self, receive: Receive) -> Response:
        body = b""
        while len(body) <= LOGIN_BYTES:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        fields = parse_qs(body[:LOGIN_BYTES].decode("latin-1"))
        address = fields.get("address", ["/"])[0]
        if self._is_token(fields.get("token", [""])[0].strip()):
            return self._let_in(address)
        return login_page(address, wrong=True)

    def _let_in(self, address: str) -> Response:
        """Redirect to an address of this server, with the cookie."""
        # Two slashes, or a backslash, at the start would lead to another one.
        response = RedirectResponse("/" + address.lstrip("/\\"), 303)
        # Lax: a shared address opens from a mail, and nothing but opening pages works from elsewhere.
        response.set_cookie(COOKIE, self.cookie, httponly=True, samesite="lax", path="/")
        return response

    def _knows_token(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(given.strip()):
            return True
        cookies = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        return any(name == COOKIE and _equal(value, self.cookie) for name, _, value in cookies)

    def _is_token(self, given: str) -> bool:
        return self.token is not None and _equal(given, self.token)


def _equal(first: str, second: str) -> bool:
    return hmac.compare_digest(first.encode("utf-8", "replace"), second.encode("utf-8", "replace"))


def _same_origin(headers: Headers, host: str) -> bool:
    """Return whether the request comes from this server's pages, as browsers say; other programs need not."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def _refused(status: int, detail: str) -> Response:
    return AsciiJSONResponse({"detail": detail}, status)


def new_token() -> str:
    return secrets.token_urlsafe(24)


def login_page(address: str, wrong: bool) -> HTMLResponse:
    """Ask for the token, and then go on to the address that was wanted."""
    wanted = "/" if address == LOGIN else html.escape(address)
    note = '<p class="problem" role="alert">That is not the token.</p>' if wrong else ""
    return HTMLResponse(
        f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>likethat: token</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="/static/icon.svg">
<link rel="stylesheet" href="/static/base.css"><link rel="stylesheet" href="/static/app.css"></head>
<body><main class="login"><h1>This server asks for a token</h1>
<p class="soft">It was printed where the server was started.</p>{note}
<form method="post" action="{LOGIN}"><input type="hidden" name="address" value="{wanted}">
<label>Token <input name="token" type="password" required autofocus autocomplete="current-password"></label>
<button class="button primary">Go on</button></form></main></body></html>""",
        401,
    )
