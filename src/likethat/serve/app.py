"""The application, put together, and the server that runs it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from likethat import __version__
from likethat.errors import UserError
from likethat.runs.classifier import Classifier
from likethat.serve.api import api_routes
from likethat.serve.corrections import Corrections
from likethat.serve.edits import edit_routes
from likethat.serve.limits import Limits
from likethat.serve.metrics import Counted
from likethat.serve.neighbours import Neighbours
from likethat.serve.pages import page_routes, static_files
from likethat.serve.problems import add_handlers
from likethat.serve.responses import AsciiJSONResponse
from likethat.serve.security import Guard
from likethat.serve.server import Server

CONNECTIONS = 1000  # open at a time
HEAD_SECONDS = 10.0  # for the head of a request to arrive
GRACE_SECONDS = 8  # longer than all answers take that are still given when the server is stopped


def create_app(
    classifier: Classifier, *, data: str | None = None, token: str | None = None, limits: Limits | None = None
) -> FastAPI:
    """Create the app. `data` is where the run's images lie, which corrections need. With a token, every request must
    bring it; without one, only loopback names are answered to."""
    neighbours = Neighbours(classifier, data)
    corrections = Corrections(neighbours, str(classifier.device))
    server = Server(classifier, limits or Limits(), neighbours, corrections)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        work = asyncio.create_task(server.batcher.run())
        yield
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        corrections.close()
        neighbours.close()

    app = FastAPI(
        title="likethat",
        version=__version__,
        description="Ask a model that explains itself: this part of the picture looks like that training patch.",
        docs_url=None,  # its page would come from another server; /api shows the document without one
        redoc_url=None,
        lifespan=lifespan,
        default_response_class=AsciiJSONResponse,
    )
    app.state.server = server
    app.include_router(api_routes(server))
    files = static_files()
    app.include_router(page_routes(server, files))
    app.include_router(edit_routes(server))
    add_handlers(app, files["index.html"])
    app.add_middleware(Guard, token=token, edit_token=server.edit_token, limits=server.limits, stopping=server.stopping)
    app.add_middleware(Counted, metrics=server.metrics)
    return app


def open_socket(host: str, port: int) -> socket.socket:
    """Bind the socket, so that a taken port is told before the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, or asyncio would let answers wait for company: 40 ms each.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
    except (OSError, OverflowError) as error:
        opened.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{host}:{port} cannot be served on ({reason}); choose another --host or --port.") from error
    return opened


class PunctualProtocol(H11Protocol):
    """Closes connections on which the head of a request does not arrive in time; h11 limits its size."""

    head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        if not self._awaits_head():
            self._stop_watching()
        elif self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self._close_if_late)

    def _stop_watching(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def _close_if_late(self) -> None:
        self.head_timer = None
        if self._awaits_head():
            self.transport.close()


class DrainingServer(uvicorn.Server):
    """Tells the application that it stops, so that everybody gets an answer."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.server.stopping.set()  # type: ignore[union-attr]
        await super().shutdown(sockets)


def make_server(app: FastAPI) -> uvicorn.Server:
    """Return what serves the application to a network."""
    config = uvicorn.Config(
        app,
        http=PunctualProtocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=GRACE_SECONDS,
        lifespan="on",
    )
    return DrainingServer(config)


def run_app(app: FastAPI, opened: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until interrupted."""
    server = make_server(app)
    opened.listen()  # who comes from now on is served as soon as it runs
    ready()
    with suppress(KeyboardInterrupt):  # the usual way to stop it
        server.run(sockets=[opened])
