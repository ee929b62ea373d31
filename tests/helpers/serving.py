"""A real server for tests: uvicorn on a free port of this machine, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from likethat.runs.classifier import Classifier
from likethat.serve.app import create_app, make_server, open_socket
from likethat.serve.limits import Limits
from likethat.serve.server import Server

PATIENT = Limits(upload_seconds=300, answer_seconds=300)  # with a busy machine


@contextmanager
def serving(classifier: Classifier, limits: Limits = PATIENT, **options: Any) -> Iterator[httpx.Client]:
    """Provide a client of a server with this model; `client.base_url` is its address, `server_of(client)` its
    inside."""
    app = create_app(classifier, limits=limits, **options)
    with open_socket("127.0.0.1", 0) as opened:
        server = make_server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        port = opened.getsockname()[1]
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False) as client:
                client.app = app  # type: ignore[attr-defined]
                yield client
        finally:
            server.should_exit = True
            thread.join(60)
    assert not thread.is_alive()


def server_of(client: httpx.Client) -> Server:
    app: FastAPI = client.app  # type: ignore[attr-defined]
    server: Server = app.state.server
    return server


def until(condition: Any, seconds: float = 120) -> None:
    """Wait for what other threads do."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def gauge(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith(f"likethat_{name} ")]
    return float(line.split()[1])


def form(*paths: Path) -> list[tuple[str, tuple[str, bytes]]]:
    return [("file", (path.name, path.read_bytes())) for path in paths]
