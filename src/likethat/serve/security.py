"""Who may ask: the right host, the right origin, the token where there is one; and what every answer forbids."""

from __future__ import annotations

import hashlib
import hmac
import html
import logging
import secrets
from urllib.parse import parse_qs, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from likethat.serve.responses import AsciiJSONResponse

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
COOKIE = "likethat"
EDIT_HEADER = "x-likethat-edit"
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
    With a token, every request must bring it: as a bearer token, or as the cookie that the login sets.
    """

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self.app, self.token = app, token
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

        refusal = await self._refusal(scope, receive)
        try:
            await (refusal or self.app)(scope, receive, with_headers)
        except Exception:
            logging.getLogger(__name__).exception("%s %s", scope["method"], scope["path"])
            if started:
                raise
            await _refused(500, "The server made a mistake; its log says which.")(scope, receive, with_headers)

    async def _refusal(self, scope: Scope, receive: Receive) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self.token is None and _name_of(host) not in LOOPBACK:
            return _refused(403, "This server answers to localhost only; use its address as it was printed.")
        if scope["method"] not in SAFE and not _same_origin(headers, host):
            return _refused(403, "Pages of other sites may not send anything here.")
        if self.token is None:
            return None
        if scope["path"] == LOGIN and scope["method"] == "POST":
            return await self._log_in(receive)
        if self._knows_token(headers) or scope["path"] in OPEN:
            return None
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


def _name_of(host: str) -> str:
    """Return the name in a Host header, without the port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


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
