"""The server under pressure: bodies without end, many large pictures, heads that never end, and being stopped."""

from __future__ import annotations

import http.client
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import httpx
import pytest
from helpers.explain_run import TinyRun, make_run
from helpers.serving import PATIENT, gauge, server_of, serving, until
from PIL import Image

from likethat.runs.classifier import load
from likethat.serve import app as serve_app

TOKEN = "a token for tests only"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("pressure"))


@pytest.fixture(scope="module")
def client(run: TinyRun) -> Iterator[httpx.Client]:
    with serving(load(run.path, "cpu")) as client:
        yield client


def large_picture(side: int) -> bytes:
    """Few bytes, many pixels."""
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((side, side)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def start(client: httpx.Client, path: str, body: bytes, length: int, **headers: str) -> socket.socket:
    """A request of which only `body` is sent."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    connection = socket.create_connection((client.base_url.host, client.base_url.port), timeout=60)
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    return connection


def send_until_closed(connection: socket.socket, data: bytes, pause: float = 0.0) -> None:
    with suppress(OSError):
        while connection.sendall(data) is None:
            time.sleep(pause)


@pytest.mark.parametrize("path", ["/api/edit", "/api/edit/save", "/api/edit/open", "/api/atlas"])
def test_corrections_check_token_size_and_time_before_they_read(client: httpx.Client, run: TinyRun, path: str) -> None:
    token = server_of(client).edit_token
    for wrong in ("", "guess"):
        with start(client, path, b'{"kind": "', 300_000_000, X_Likethat_Edit=wrong) as connection:
            assert connection.recv(12) == b"HTTP/1.1 403", "without another byte of the 300 MB"
    if path in ("/api/edit", "/api/edit/save"):
        with start(client, path, b'{"kind": "', 300_000_000, X_Likethat_Edit=token) as connection:
            assert connection.recv(12) == b"HTTP/1.1 413"


def test_a_body_without_announced_length_is_cut_off(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer comes at once; who goes on to send nevertheless is listened to for a while, and not for ever."""
    monkeypatch.setattr(serve_app, "HEAD_SECONDS", 0.5)
    token, chunk = server_of(client).edit_token, b"186a0\r\n" + b" " * 100_000 + b"\r\n"
    lines = ["POST /api/edit HTTP/1.1", "Host: localhost", "Transfer-Encoding: chunked", f"X-Likethat-Edit: {token}"]
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode())
        for _ in range(6):
            connection.sendall(chunk)
        assert connection.recv(12) == b"HTTP/1.1 413"
        send_until_closed(connection, chunk)


def test_a_body_that_does_not_come_is_not_waited_for(run: TinyRun) -> None:
    with serving(load(run.path, "cpu"), limits=replace(PATIENT, upload_seconds=0.3)) as client:
        token = server_of(client).edit_token
        with start(client, "/api/edit", b'{"kind"', 500, X_Likethat_Edit=token) as connection:
            assert connection.recv(12) == b"HTTP/1.1 408"
    with (
        serving(load(run.path, "cpu"), limits=replace(PATIENT, upload_seconds=0.3), token=TOKEN) as client,
        start(client, "/login", b"token=", 500) as connection,
    ):
        assert connection.recv(12) == b"HTTP/1.1 408"


def test_large_pictures_at_once_are_answered_and_pages_do_not_wait(run: TinyRun) -> None:
    """More of them than can be decoded in the time that one may take. Each is answered; one too many is told when to
    come back, and other requests are answered meanwhile."""
    picture = large_picture(3500)
    headers = {"Content-Type": "image/png"}
    with serving(load(run.path, "cpu")) as client:
        started = time.monotonic()
        assert client.post("/api/explain", content=picture, headers=headers).status_code == 200
        alone = time.monotonic() - started
    many = 16
    limits = replace(PATIENT, answer_seconds=4 * alone, waiting=many)
    with serving(load(run.path, "cpu"), limits=limits) as client, ThreadPoolExecutor(many) as threads:
        waiting = [threads.submit(client.post, "/api/explain", content=picture, headers=headers) for _ in range(many)]
        until(lambda: gauge(client, "slots_taken") == many)
        refused = client.post("/api/explain", content=picture, headers=headers)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert client.get("/api/run").status_code == client.get("/api/prototypes").status_code == 200
        assert sum(not request.done() for request in waiting) > many // 2, "they were not waited for"
        assert [request.result().status_code for request in waiting] == [200] * many


def test_a_stopped_server_answers_everybody(run: TinyRun) -> None:
    picture, many = large_picture(6000), 32  # so many take longer than a server waits that stops, on fast machines, too
    command = [sys.executable, "-m", "likethat", "serve", str(run.path), "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout
        found = re.search(r":(\d+)/", process.stdout.readline())
        assert found
        address = f"http://127.0.0.1:{found[1]}"

        def ask() -> tuple[int, str | None]:
            answer = httpx.post(f"{address}/api/explain", content=picture, timeout=300, trust_env=False)
            return answer.status_code, answer.headers.get("Retry-After")

        with (
            httpx.Client(base_url=address, trust_env=False, timeout=300) as client,
            ThreadPoolExecutor(many) as threads,
        ):
            waiting = [threads.submit(ask) for _ in range(many)]
            until(lambda: sum(request.done() for request in waiting) + gauge(client, "slots_taken") == many)
            process.send_signal(signal.SIGTERM)
            answers = [request.result() for request in waiting]
        _, told = process.communicate(timeout=120)
    assert {status for status, _ in answers} <= {200, 503}
    assert (503, "5") in answers
    assert all(retry for status, retry in answers if status == 503)
    assert "Traceback" not in told
    assert "Error" not in told


def test_heads_that_never_end_are_closed(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_app, "HEAD_SECONDS", 0.5)
    address = (client.base_url.host, client.base_url.port)
    with socket.create_connection(address, timeout=60) as silent:
        assert silent.recv(1) == b"", "nothing was sent at all"
    with socket.create_connection(address, timeout=60) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        send_until_closed(slow, b"X-A: b\r\n", 0.05)
    with socket.create_connection(address, timeout=60) as fast:
        fast.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * 100_000)
        assert fast.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 431", b""), "it is too large"
    kept = http.client.HTTPConnection(*address)
    for _ in range(3):  # a connection that is used stays open
        kept.request("GET", "/health")
        assert kept.getresponse().read()
        time.sleep(0.3)
    kept.close()


ODD = [
    "localhost/.evil.com", "evil.com@127.0.0.1", "127.0.0.1#.evil.com", "localhost?x", "localhost\\.evil.com",
    "localhost:80:80", "localhost:", "localhost:x", "user:pw@localhost", "[::1].evil.com", "[::1", "local host",
    "127.0.0.1,evil.com", "localhost:999999", "%6cocalhost", "::1",
]  # fmt: skip


@pytest.mark.parametrize("host", ODD)
def test_odd_hosts_are_refused(client: httpx.Client, host: str) -> None:
    assert client.get("/api/prototypes", headers={"Host": host}).status_code in (400, 403)


def test_odd_hosts_are_refused_with_a_token_too(run: TinyRun) -> None:
    with serving(load(run.path, "cpu"), token=TOKEN) as client:
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        odd = [client.get("/api/run", headers={**bearer, "Host": host}) for host in ODD]
        assert {answer.status_code for answer in odd} == {400}
        for good in ("radiology.example", "a_b-c.example.:8000", "[fe80::1]:1", "10.0.0.7:8000"):
            assert client.get("/api/run", headers={**bearer, "Host": good}).status_code == 200
