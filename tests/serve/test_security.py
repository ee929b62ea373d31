"""The server among visitors: hosts, origins, tokens, hostile files and paths."""

from __future__ import annotations

import http.client
import io
import os
import random
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.explain_run import TinyRun, make_run
from helpers.serving import form, serving
from PIL import Image

from likethat.cli.parser import main
from likethat.runs.classifier import load

TOKEN = "a token for tests only"
NASTY = '<img src=x onerror="alert(1)">'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    folder = tmp_path_factory.mktemp("visitors")
    (folder / "secret.jpg").write_bytes(b"secret")
    return make_run(folder, ("finch", "owl", NASTY))


@pytest.fixture(scope="module")
def picture(run: TinyRun) -> Path:
    return run.root / run.samples[0].path


@pytest.fixture(scope="module")
def client(run: TinyRun) -> Iterator[httpx.Client]:
    with serving(load(run.path, "cpu")) as client:
        yield client


@pytest.mark.parametrize("path", ["/", "/health", "/static/app.css", "/api/prototypes", "/nowhere", "/openapi.json"])
def test_every_answer_carries_the_headers(client: httpx.Client, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "same-origin"


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "", "[", "a@b"]
)
def test_other_names_for_this_machine_are_refused(client: httpx.Client, host: str) -> None:
    """A page elsewhere may point its own name at 127.0.0.1."""
    assert client.get("/api/prototypes", headers={"Host": host}).status_code in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"])
def test_loopback_names_are_answered(client: httpx.Client, host: str) -> None:
    assert client.get("/api/prototypes", headers={"Host": host}).status_code == 200


def test_pages_of_other_sites_may_not_send_anything(client: httpx.Client, picture: Path) -> None:
    def status(path: str, **headers: str) -> int:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return client.post(path, files=form(picture), headers=names).status_code

    own = str(client.base_url)
    for path in ("/api/explain", "/api/pictures"):
        assert status(path, Origin="http://evil.example") == 403
        assert status(path, Origin="null") == 403
        assert status(path, Origin="http://[") == 403
        assert status(path, Origin=own.replace("127.0.0.1", "localhost")) == 403
        assert status(path, Sec_Fetch_Site="cross-site") == 403
        assert status(path, Sec_Fetch_Site="same-site", Origin=own) == 403
        assert status(path, Sec_Fetch_Site="same-origin", Origin=own) in (200, 201)
    answer = client.options("/api/explain", headers={"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


def raw_get(client: httpx.Client, path: str) -> tuple[int, str | None, bytes]:
    """Status, location and content. httpx would tidy the path up before it sends it."""
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port or 80)
    connection.request("GET", path)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers["location"], content


def test_a_token_is_asked_for(run: TinyRun, picture: Path) -> None:
    with serving(load(run.path, "cpu"), token=TOKEN) as client:
        assert client.get("/health").status_code == 200
        closed = ("/", "/api/run", "/api/prototypes", "/metrics", "/openapi.json", "/prototypes/0/crop.jpg", "/ask/x")
        assert {client.get(path).status_code for path in closed} == {401}
        assert client.post("/api/explain", files=form(picture)).status_code == 401
        assert 'type="password"' in client.get("/").text
        for wrong in ("a", TOKEN + "x", "ü"):
            bearer = {"Authorization": f"Bearer {wrong}".encode()}
            assert client.get("/api/run", headers=bearer).status_code == 401
            assert client.get("/", params={"token": wrong}).status_code == 401
            assert client.post("/login", data={"token": wrong}).status_code == 401
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert client.post("/api/explain", files=form(picture), headers=bearer).status_code == 200
        assert client.get("/api/run", headers={**bearer, "Host": "radiology.example"}).status_code == 200

        opened = client.get("/browse", params={"token": TOKEN, "class": "owl"})
        assert opened.status_code == 303
        assert opened.headers["location"] == "/browse?class=owl", "the token does not stay in the address"
        cookie = opened.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=lax" in cookie
        assert TOKEN not in cookie
        assert client.get("/api/run").status_code == 200, "by the cookie"
        client.cookies.clear()
        assert raw_get(client, f"//evil.example/?token={TOKEN.replace(' ', '%20')}")[1] == "/evil.example/"
        client.cookies.clear()
        for wanted, location in (
            ("/prototypes/1?x=1", "/prototypes/1?x=1"),
            ("//evil.example", "/evil.example"),
            ("/\\evil.example", "/evil.example"),
            ("https://evil.example", "/https://evil.example"),
            ("\t//evil.example", "/%09//evil.example"),
        ):
            answer = client.post("/login", data={"token": f" {TOKEN}", "address": wanted})
            assert (answer.status_code, answer.headers["location"]) == (303, location)
            client.cookies.clear()
        assert NASTY not in client.get("/ask/" + NASTY).text
        assert client.post("/login", data={"token": TOKEN}).headers["location"] == "/"
        assert client.get("/").status_code == 200


def test_the_command_serves_other_machines_with_a_token_and_stops(run: TinyRun) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = "--host 0.0.0.0 --port 0 --device cpu".split()
    command = [sys.executable, "-m", "likethat", "serve", str(run.path), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout
            line = process.stdout.readline()
            found = re.fullmatch(r"Serving .* at http://0\.0\.0\.0:(\d+)/\?token=([A-Za-z0-9_-]{20,})\n", line)
            assert found, line
            with httpx.Client(base_url=f"http://127.0.0.1:{found[1]}", timeout=300, trust_env=False) as client:
                assert client.get("/api/run").status_code == 401
                answer = client.get("/api/run", headers={"Authorization": f"Bearer {found[2]}"})
            assert answer.status_code == 200
            assert "server" not in answer.headers
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0


def test_mistakes_of_the_command_get_a_sentence(
    run: TinyRun, client: httpx.Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> str:
        assert main(["serve", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "choose another --host or --port" in refused(run.path, "--port", client.base_url.port)
    assert "choose another --host or --port" in refused(run.path, "--port", 70_000)
    assert "choose another --host or --port" in refused(run.path, "--host", "no.such.host.invalid")
    assert "no run folder" in refused(run.path / "nowhere", "--port", 0)
    monkeypatch.setenv("LIKETHAT_TOKEN", "short")
    assert "at least 16" in refused(run.path)
    code = (
        "import sys; sys.modules['uvicorn'] = None; from likethat.cli.parser import main; "
        "sys.exit(main(['serve', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'likethat[serve]'" in done.stderr
    assert "Traceback" not in done.stderr


TRICKS = [
    "../secret.jpg", "..%2fsecret.jpg", "%2e%2e/secret.jpg", "%2e%2e%2fsecret.jpg", "..%5csecret.jpg",
    "....//secret.jpg", "..%252fsecret.jpg", "/etc/passwd", "%2fetc%2fpasswd", "..", ".", "%00", "crop.jpg%00", "-1",
    "1e9", "99999999999999999999999", "0x1", "%c0%ae%c0%ae/secret.jpg", "%e2%80%a5/secret.jpg", "con", "a" * 5000,
]  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    [
        "/static/{}", "/static/../{}", "/prototypes/{}/crop.jpg", "/prototypes/0/{}", "/prototypes/0/{}.jpg",
        "/atlas/{}", "/atlas/{}.webp", "/pictures/{}/picture.jpg", "/pictures/{}/explanation.png",
        "/pictures/x/explanation.{}", "/ask/{}", "/api/pictures/{}", "/api/prototypes/{}", "/{}",
    ],
)  # fmt: skip
def test_path_tricks_find_nothing(client: httpx.Client, pattern: str) -> None:
    for trick in TRICKS:
        status, _, content = raw_get(client, pattern.format(trick))
        assert status in (200, 307, 400, 404, 405, 422), (trick, status)
        if status == 200:
            assert pattern == "/ask/{}", trick
            assert content.startswith(b"<!doctype html>")
        assert b"secret" not in content.replace(b"/secret.jpg", b"")
        assert b"root:" not in content


def test_pictures_that_a_damaged_run_names_outside_itself_are_not_shown(run: TinyRun) -> None:
    classifier = load(run.path, "cpu")
    secret = str(run.path.parent / "secret.jpg")
    names = ("../secret.jpg", "/etc/passwd", secret, "config.json", "\0.jpg")
    outside = [replace(p, crop=name) for p, name in zip(classifier.prototypes, names, strict=False)]
    classifier.prototypes = (*outside, *classifier.prototypes[len(outside) :])
    with serving(classifier) as client:
        assert [client.get(f"/prototypes/{p.id}/crop.jpg").status_code for p in outside] == [404] * len(outside)


def test_names_of_classes_and_files_are_data_everywhere(client: httpx.Client, picture: Path) -> None:
    files = [("file", (f"../../{NASTY}\r\nX: y.png", picture.read_bytes()))]
    (kept,) = client.post("/api/pictures", files=files).json()["pictures"]
    page = client.get(f"/pictures/{kept['id']}/explanation.html", params={"against": NASTY})
    assert NASTY not in page.text
    assert page.headers["content-disposition"].startswith("attachment; filename*=UTF-8''")
    assert "x" not in page.headers
    assert client.get(f"/pictures/{kept['id']}/explanation.png").content.startswith(b"\x89PNG")
    assert NASTY not in client.get("/").text


def encoded(kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").resize((60, 40)).save(buffer, kind, **options)
    return buffer.getvalue()


def test_hostile_pictures(client: httpx.Client) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    jpeg = encoded("JPEG", exif=exif)
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
    bomb = bytearray(encoded("PNG"))
    bomb[16:24] = (19_000).to_bytes(4, "big") * 2
    bomb[29:33] = zlib.crc32(bytes(bomb[12:29])).to_bytes(4, "big")
    cases = [
        (b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>", 422),
        (b"<html><script>alert(1)</script></html>", 422),
        (b"%PDF-1.7", 422),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 422),
        (b"PK\x03\x04" + bytes(100), 422),
        (header, 422),
        (bytes(bomb), 413),
        (jpeg[: len(jpeg) // 2], 422),
        (jpeg.replace(b"Exif\0\0", b"Exif\0\0\xff\xff\xff", 1), 200),  # broken EXIF, good pixels
        (jpeg + b"<script>alert(1)</script>", 200),  # polyglots are pictures, and are never handed out again
        (encoded("GIF", comment=b"<script>alert(1)</script>"), 200),
    ]
    for data, expected in cases:
        answer = client.post("/api/explain", files={"file": ("a.jpg", data)})
        assert answer.status_code == expected, (data[:40], answer.text)
        assert len(answer.json().get("detail", "")) < 300
    polyglot = {"file": ("a.html", jpeg + b"<script>alert(1)</script>")}
    (kept,) = client.post("/api/pictures", files=polyglot).json()["pictures"]
    shown = client.get(kept["picture"])
    assert shown.headers["content-type"] == "image/jpeg"
    assert b"script" not in shown.content
    assert Image.open(io.BytesIO(shown.content)).size == (40, 60), "upright"


def mutate(data: bytes, draw: random.Random) -> bytes:
    mutant = bytearray(data)
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(max(1, len(mutant)))
        match draw.randrange(6):
            case 0:
                mutant[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del mutant[at : at + draw.randint(1, 200)]
            case 2:
                mutant[at:at] = draw.randbytes(draw.randint(1, 200))
            case 3:
                mutant[at:at] = mutant[draw.randrange(max(1, len(mutant))) :][: draw.randint(1, 500)]
            case 4:
                del mutant[max(1, at) :]
            case 5:
                mutant[at : at + 4] = draw.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"))
    return bytes(mutant)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_500_mutated_files_do_not_break_it(client: httpx.Client) -> None:
    draw = random.Random(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    seeds = [
        encoded("JPEG", exif=exif), encoded("JPEG", progressive=True), encoded("PNG"), encoded("GIF"), encoded("BMP"),
        encoded("WEBP"), encoded("WEBP", lossless=True), encoded("TIFF"), encoded("TIFF", compression="tiff_lzw"),
        encoded("TIFF", compression="jpeg"),
    ]  # fmt: skip
    statuses: dict[int, int] = {}
    for number in range(500):
        mutant = mutate(seeds[number % len(seeds)], draw)
        if number % 5 == 0:  # the form around the file as well
            request = client.build_request("POST", "/api/explain", files={"file": ("a.jpg", mutant)})
            body = mutate(request.read(), draw)
            headers = {"Content-Type": request.headers["Content-Type"]}
            answer = client.post("/api/explain", content=body, headers=headers)
        else:
            answer = client.post("/api/explain", content=mutant, headers={"Content-Type": "image/jpeg"})
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert answer.status_code in (200, 400, 413, 422), answer.text
        assert "Traceback" not in answer.text
    assert statuses[200] > 20, "some mutants are still pictures"
    assert statuses[422] > 100
