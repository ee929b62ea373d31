"""Requests of every kind, drawn by hypothesis: the server answers each, and never with a mistake of its own."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers.explain_run import make_run
from helpers.serving import gauge, server_of, serving
from hypothesis import event, given, settings
from hypothesis import strategies as st
from PIL import Image

from likethat.runs.classifier import load


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(load(make_run(tmp_path_factory.mktemp("fuzz")).path, "cpu")) as client:
        yield client


def picture(kind: str, mode: str, width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").convert(mode).resize((width, height)).save(buffer, kind)
    return buffer.getvalue()


SIDES = st.integers(1, 70)
PICTURES = st.builds(picture, st.sampled_from(["PNG", "TIFF"]), st.sampled_from(["L", "RGB", "RGBA"]), SIDES, SIDES)
NAMES = st.one_of(st.none(), st.text(max_size=20), st.sampled_from(["../../x.png", "a\0b", "x" * 5000, "", '"; x="y']))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A picture with some of its bytes changed, or cut short, or anything."""
    data = bytearray(draw(PICTURES))
    for _ in range(draw(st.integers(0, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    whole = bytes(data[: draw(st.integers(0, len(data)))]) if draw(st.booleans()) else bytes(data)
    return draw(st.sampled_from([whole, b"", b"\x89PNG\r\n\x1a\n"])) + draw(st.binary(max_size=20))


TYPES = st.sampled_from(
    ["image/jpeg", "application/json", "multipart/form-data", "multipart/form-data; boundary=x", "\xff", ""]
)
QUERIES = st.dictionaries(
    st.sampled_from(["top_classes", "against", "maps", "percentile", "level", "class", "attribution", "token"]),
    st.sampled_from(["", "0", "1", "2", "-1", "nan", "inf", "1e400", "true", "finch", "\0", "gradient", "9" * 400]),
    max_size=3,
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["kind", "revision", "prototypes", "text", "candidate", "who", "why", "name"])
KINDS = st.sampled_from(["ban", "merge", "name", "replace", "undo", "redo", 0, None])
CORRECTIONS = st.one_of(
    JSON,
    st.dictionaries(FIELDS, JSON | st.integers(0, 3) | st.lists(st.integers(-1, 9), max_size=3), max_size=8),
    st.fixed_dictionaries(
        {"kind": KINDS, "revision": st.integers(0, 1), "prototypes": st.lists(st.integers(0, 9)), "who": st.text()}
    ),
)


def check(answer: httpx.Response) -> None:
    event(f"{answer.request.url.path.split('/')[2]}: {answer.status_code}")
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    if answer.status_code >= 400:
        assert 0 < len(answer.json()["detail"]) < 6000
    assert "Traceback" not in answer.text


@pytest.mark.timeout(600)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_uploads(client: httpx.Client, data: st.DataObject) -> None:
    path, query = data.draw(st.sampled_from(["/api/explain", "/api/pictures"])), data.draw(QUERIES)
    if data.draw(st.booleans()):
        files = data.draw(st.lists(st.tuples(NAMES, damaged()), max_size=3))
        field = data.draw(st.sampled_from(["file", "file", "files"]))
        answer = client.post(path, params=query, files=[(field, file) for file in files])
    else:
        headers = {"Content-Type": data.draw(TYPES).encode("latin-1")}
        answer = client.post(path, params=query, content=data.draw(damaged()), headers=headers)
    check(answer)
    if answer.status_code == 201:
        kept = answer.json()["pictures"][0]["id"]
        check(client.get(f"/api/pictures/{kept}", params=data.draw(QUERIES)))
    assert gauge(client, "slots_taken") == 0


@pytest.mark.timeout(600)
@settings(max_examples=100, deadline=None)
@given(CORRECTIONS, st.sampled_from(["/api/edit", "/api/edit/save"]), st.booleans())
def test_corrections(client: httpx.Client, body: Any, path: str, is_cut: bool) -> None:
    headers = {"X-Likethat-Edit": server_of(client).edit_token, "Content-Type": "application/json"}
    text = json.dumps(body).encode()
    check(client.post(path, content=text[: len(text) // 2] if is_cut else text, headers=headers))
