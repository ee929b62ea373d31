"""The API: the same answers as the command line, requests batched, turned away when there are too many."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers.explain_run import TinyRun, make_run
from helpers.names import CLASS, FILE, needs_such_names
from helpers.serving import PATIENT, form, gauge, server_of, serving, until
from PIL import Image

from likethat.cli.parser import main
from likethat.explaining.explanation import explain
from likethat.runs.classifier import Classifier, load
from likethat.serve.app import open_socket


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("api"))


@pytest.fixture(scope="module")
def pictures(run: TinyRun) -> list[Path]:
    return [run.root / sample.path for sample in run.samples]


@pytest.fixture(scope="module")
def client(run: TinyRun) -> Iterator[httpx.Client]:
    with serving(load(run.path, "cpu")) as client:
        yield client


def likethat_explain(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["explain", *map(str, arguments), "--device", "cpu", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_explain_gives_what_the_command_gives(
    run: TinyRun, pictures: list[Path], client: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = pictures[1]  # turned by EXIF
    expected = likethat_explain(capsys, run.path, picture)
    raw = client.post("/api/explain", content=picture.read_bytes(), headers={"Content-Type": "image/png"})
    assert raw.status_code == 200
    assert raw.json() == {"images": [{**expected["images"][0], "path": None}], "skipped": []}
    named = client.post("/api/explain", files=form(picture)).json()
    assert named == {"images": [{**expected["images"][0], "path": picture.name}], "skipped": []}

    options = ("--top-classes", 2, "--against", "owl", "--maps")
    expected = likethat_explain(capsys, run.path, picture, *options)
    asked = {"top_classes": 2, "against": "owl", "maps": True}
    answer = client.post("/api/explain", files=form(picture), params=asked).json()
    assert answer["images"] == [{**expected["images"][0], "path": picture.name}]
    wide, narrow = (
        client.post("/api/explain", files=form(picture), params={"percentile": p}).json()["images"][0]["nearest"][0]
        for p in (10, 99)
    )
    assert area(wide["box"]) > 2 * area(narrow["box"])


def test_hidden_parts_as_the_command_hides_them(
    run: TinyRun, pictures: list[Path], client: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = pictures[1]  # turned by EXIF: boxes are in pixels of the file, as those of the answers
    whole = client.post("/api/explain", files=form(picture)).json()["images"][0]
    box = whole["classes"][0]["groups"][0]["box"]
    asked = [",".join(map(str, box)), "0,0,20.5,30"]
    expected = likethat_explain(capsys, run.path, picture, "--hide", asked[0], "--hide", asked[1])["images"][0]
    (image,) = client.post("/api/explain", files=form(picture), params={"hide": asked}).json()["images"]
    assert image == {**expected, "path": picture.name}
    assert image["hidden"] == [pytest.approx(box), pytest.approx([0, 0, 20.5, 30])]
    assert image["classes"][0]["logit"] != whole["classes"][0]["logit"]

    def refused(*hide: str) -> str:
        answer = client.post("/api/explain", files=form(picture), params={"hide": hide})
        assert answer.status_code == 422
        return str(answer.json()["detail"])

    assert "x0,y0,x1,y1" in refused("1,2,3")
    assert "outside of the picture" in refused("90000,0,90001,5")
    assert "hide" in refused(*["0,0,5,5"] * 21)


def test_what_the_page_hears_of_hidden_parts(run: TinyRun, pictures: list[Path], client: httpx.Client) -> None:
    classifier = load(run.path, "cpu")
    (kept,) = client.post("/api/pictures", files=form(pictures[0])).json()["pictures"]
    whole = explain(classifier, pictures[0])
    best, other = whole.classes[0].name, whole.classes[1].name
    width, height = whole.picture.size
    hidden = explain(classifier, pictures[0], hide=[(0.25 * width, 0, 0.5 * width, 0.5 * height)])
    address = f"/api/pictures/{kept['id']}/hidden"
    answer = client.get(address, params={"hide": "0.25,0,0.5,0.5", "class": best, "against": other}).json()
    assert answer["predicted"] == hidden.predicted.name
    assert [row["name"] for row in answer["ranking"]] == [sheet.name for sheet in hidden.classes]
    for shown, name in zip(answer["sheets"], (best, other), strict=True):
        sheet = hidden.sheet(name)
        assert shown["logit"] == pytest.approx(sheet.logit, abs=1e-4)
        assert shown["points"] == pytest.approx({str(r.match.prototype.id): r.points for r in sheet.rows}, abs=1e-4)
        assert sum(shown["points"].values()) == pytest.approx(sheet.logit, abs=1e-3)
        for row in sheet.rows:
            match = answer["matches"][str(row.match.prototype.id)]
            assert match["box"] == pytest.approx(list(row.match.share))
            assert match["similarity"] == pytest.approx(row.match.similarity, abs=1e-5)
    assert answer["difference"]["logit"] == pytest.approx(hidden.lead(best, other).logit, abs=1e-4)
    assert answer["hidden"] == [[0.25, 0, 0.5, 0.5]]
    red, green, blue = (int(answer["colour"][place : place + 2], 16) for place in (1, 3, 5))
    assert hidden.picture.getpixel((round(0.3 * width), 5)) == (red, green, blue)
    assert client.get(address, params={"hide": "0.25,0,0.5"}).status_code == 422
    assert client.get(address, params={"hide": "2,0,3,1"}).status_code == 422
    sheet = client.get(f"/pictures/{kept['id']}/explanation.json", params={"hide": "0.25,0,0.5,0.5"}).json()
    assert sheet["hidden"] == hidden.to_dict()["hidden"]
    assert "painted over" in client.get(f"/pictures/{kept['id']}/explanation.html?hide=0,0,1,0.5").text


def test_the_page_shows_both_sides_by_the_method(run: TinyRun, pictures: list[Path], client: httpx.Client) -> None:
    (kept,) = client.post("/api/pictures", files=form(pictures[0])).json()["pictures"]
    address = f"/api/pictures/{kept['id']}"
    expected = explain(load(run.path, "cpu"), pictures[0], attribution="gradient")
    usual, found = (client.get(address, params={"attribution": name}).json() for name in ("upsampling", "gradient"))
    for match in expected.nearest:
        ours, papers = (answer["matches"][str(match.prototype.id)] for answer in (found, usual))
        assert match.source_share is not None
        assert ours["source_box"] == pytest.approx(list(match.source_share))
        assert papers["source_box"] != pytest.approx(list(match.source_share))
        assert ours["crop"].startswith("data:image/jpeg;base64,")
        assert papers["crop"].startswith("/prototypes/")
        assert ours["source"] == papers["source"]


def area(box: list[float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def test_several_pictures_and_what_is_none(run: TinyRun, pictures: list[Path], client: httpx.Client) -> None:
    files = [*form(*pictures[:3]), ("file", ("notes.txt", b"a robin")), ("other", ("x.png", b""))]
    answer = client.post("/api/explain", files=files).json()
    assert [image["path"] for image in answer["images"]] == [path.name for path in pictures[:3]]
    classifier = load(run.path, "cpu")
    for image, path in zip(answer["images"], pictures, strict=False):
        assert image["predicted"] == classifier.predict(path).class_name
    (skipped,) = answer["skipped"]
    assert skipped["path"] == "notes.txt"
    assert "none of these" in skipped["reason"]


def test_prototypes(run: TinyRun, client: httpx.Client) -> None:
    document = client.get("/api/prototypes").json()
    assert document["count"] == len(run.prototypes) == len(document["prototypes"])
    assert document["atlas"] is False
    weight_KP = run.model.last_layer.weight.detach()
    for prototype, entry in zip(run.prototypes, document["prototypes"], strict=True):
        assert (entry["id"], entry["class"], entry["path"]) == (prototype.id, prototype.class_name, prototype.path)
        assert entry["weight"] == pytest.approx(float(weight_KP[prototype.label, prototype.id]))
        assert entry["box"] == list(prototype.box)
        for kind in ("crop", "source"):
            picture = client.get(entry[kind])
            assert picture.headers["content-type"] == "image/jpeg"
            assert picture.content == (run.path / getattr(prototype, kind)).read_bytes()
        width, height = entry["source_size"]
        assert [entry["source_box"][0] * width, entry["source_box"][3] * height] == pytest.approx(
            [prototype.source_box[0], prototype.source_box[3]]
        )
    owls = client.get("/api/prototypes", params={"class": "owl"}).json()
    assert [entry["id"] for entry in owls["prototypes"]] == [p.id for p in run.prototypes if p.class_name == "owl"]
    found = client.get("/api/prototypes", params={"search": "WRE", "start": 1, "most": 5}).json()
    assert found["count"] == 2
    assert [entry["class"] for entry in found["prototypes"]] == ["wren"]
    one = client.get("/api/prototypes/3").json()
    assert {key: value for key, value in one.items() if key not in ("train", "val")} == document["prototypes"][3]
    assert one["train"] is None, "nobody has searched for neighbours"
    assert client.get("/api/prototypes/99").status_code == 404


def test_names_need_not_be_valid_unicode(tmp_path: Path) -> None:
    needs_such_names(tmp_path)
    alike = (os.fsdecode(b"\xe8"), os.fsdecode(b"\xe9"))
    run = make_run(tmp_path, ("finch", CLASS, *alike, "wren"), ending=FILE)
    picture, sent = (run.root / run.samples[0].path).read_bytes(), CLASS.replace("\udcf6", "\ufffd")
    with serving(load(run.path, "cpu")) as client:
        assert [entry["name"] for entry in client.get("/api/run").json()["classes"]] == list(run.classes)
        entries = client.get("/api/prototypes").json()["prototypes"]
        assert [(entry["class"], entry["path"]) for entry in entries] == [
            (p.class_name, p.path) for p in run.prototypes
        ]
        own = client.get("/api/prototypes", params={"class": sent}).json()["prototypes"]
        assert own == [entry for entry in entries if entry["class"] == CLASS]
        assert client.get(f"/api/prototypes/{own[0]['id']}").json()["path"] == own[0]["path"]
        refused = client.get("/api/prototypes", params={"class": "M?we"})
        assert refused.status_code == 422
        refused = client.get("/api/prototypes", params={"class": "\ufffd"})
        assert "Several classes" in refused.json()["detail"], "rather than another one's evidence"

        (image,) = client.post("/api/explain", content=picture, params={"against": sent}).json()["images"]
        assert CLASS in (image["against"], image["predicted"])
        assert FILE in image["nearest"][0]["source"]["path"]

        # A client may call its picture so too, by an odd encoding.
        name = rb'form-data; name="file"; filename="caf\udce9.png"'
        body = b"--x\r\nContent-Disposition: " + name + b"\r\n\r\n" + picture + b"\r\n--x--\r\n"
        kind = {"Content-Type": "multipart/form-data; boundary=x; charset=unicode_escape"}
        (kept,) = client.post("/api/pictures", content=body, headers=kind).json()["pictures"]
        assert kept["name"] == f"{FILE}.png"
        answer = client.get(f"/api/pictures/{kept['id']}", params={"class": sent, "against": "finch"}).json()
        assert [sheet["name"] for sheet in answer["sheets"]] == [CLASS, "finch"]
        for form_ in ("html", "json", "png"):
            file = client.get(f"/pictures/{kept['id']}/explanation.{form_}", params={"class": sent})
            assert file.status_code == 200
            assert f"caf%3F-explained.{form_}" in file.headers["content-disposition"]


def test_mistakes_get_a_sentence(client: httpx.Client, pictures: list[Path]) -> None:
    data = pictures[0].read_bytes()

    def problem(**request: Any) -> tuple[int, str]:
        answer = client.post("/api/explain", **request)
        return answer.status_code, answer.json()["detail"]

    assert problem(content=b"")[0] == 400
    assert problem(files={"wrong": ("a.png", data)})[0] == 400
    assert problem(content=b"--x", headers={"Content-Type": "multipart/form-data"})[0] == 400
    status, detail = problem(content=b"<!doctype html><p>", headers={"Content-Type": "image/jpeg"})
    assert (status, "it is a web page" in detail) == (422, True)
    status, detail = problem(content=data, params={"against": "nobody"})
    assert (status, "no class called 'nobody'" in detail) == (422, True)
    status, detail = problem(content=data, params={"percentile": 101})
    assert (status, detail.startswith("percentile: ")) == (422, True)
    assert client.get("/api/explain").status_code == 405
    assert client.get("/nowhere").status_code == 404


def test_answers_are_sent_at_once() -> None:
    """A socket that waits to fill its packets costs every request 40 ms."""
    accepted: list[asyncio.StreamWriter] = []
    opened = open_socket("127.0.0.1", 0)
    opened.listen()

    async def accept() -> None:
        server = await asyncio.start_server(lambda _, writer: accepted.append(writer), sock=opened)
        async with server:  # which is left when both ends of the connection are closed
            _, writer = await asyncio.open_connection(*opened.getsockname())
            while not accepted:
                await asyncio.sleep(0.01)
            assert accepted[0].get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            accepted[0].close()
            writer.close()

    asyncio.run(accept())


def test_health_and_metrics(client: httpx.Client) -> None:
    before = client.get("/metrics").text
    assert client.get("/health").json() == {"status": "ok"}
    client.request("BREW", "/health")
    client.get("/such/a/path")
    after = client.get("/metrics").text
    assert after != before
    assert 'route="/such' not in after, "visitors cannot grow the table"
    assert 'method="BREW"' not in after
    assert 'likethat_requests_total{method="GET",route="/health",status="200"}' in after


@contextmanager
def held_back(classifier: Classifier) -> Iterator[threading.Event]:
    """The network waits inside its forward pass until the event is set."""
    go = threading.Event()
    handle = classifier.networks[0].register_forward_pre_hook(lambda *_: go.wait(300) and None)
    try:
        yield go
    finally:
        go.set()
        handle.remove()


def test_waiting_requests_share_a_forward_pass(run: TinyRun, pictures: list[Path], client: httpx.Client) -> None:
    classifier = load(run.path, "cpu")
    alone = [client.post("/api/explain", files=form(path)).json() for path in pictures]
    with serving(classifier) as other, held_back(classifier) as go, ThreadPoolExecutor(9) as threads:
        first = threads.submit(other.post, "/api/explain", files=form(pictures[0]))
        until(lambda: gauge(other, "batches_total") == 1)
        rest = [threads.submit(other.post, "/api/explain", files=form(path)) for path in pictures[1:]]
        until(lambda: gauge(other, "pictures_waiting") == len(rest))
        go.set()
        answers = [waiting.result().json() for waiting in (first, *rest)]
        assert gauge(other, "batches_total") == 2
        assert gauge(other, "slots_taken") == 0
    for answer, single in zip(answers, alone, strict=True):
        (image,), (expected,) = answer["images"], single["images"]
        assert (image["path"], image["predicted"]) == (expected["path"], expected["predicted"])
        assert image["classes"][0]["logit"] == pytest.approx(expected["classes"][0]["logit"], abs=1e-4)


def send_raw(client: httpx.Client, data: bytes, length: int | None = None) -> socket.socket:
    """A request of which only `data` is sent, over a connection of its own."""
    connection = socket.create_connection((client.base_url.host, client.base_url.port))
    head = f"POST /api/explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length or len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def test_a_full_queue_says_when_to_come_back_and_who_leaves_makes_room(run: TinyRun, pictures: list[Path]) -> None:
    data = pictures[0].read_bytes()
    with serving(load(run.path, "cpu"), limits=replace(PATIENT, waiting=2)) as client:
        slow = [send_raw(client, data[:50], len(data)) for _ in range(2)]
        until(lambda: gauge(client, "slots_taken") == 2)
        refused = client.post("/api/explain", files=form(pictures[0]))
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        slow[0].close()
        until(lambda: gauge(client, "slots_taken") == 1)
        assert client.post("/api/explain", files=form(pictures[0])).status_code == 200
        slow[1].sendall(data[50:])
        assert slow[1].recv(12) == b"HTTP/1.1 200"
        slow[1].close()


def test_the_picture_of_a_client_that_left_is_not_computed(run: TinyRun, pictures: list[Path]) -> None:
    classifier = load(run.path, "cpu")
    with serving(classifier) as client, held_back(classifier) as go, ThreadPoolExecutor(2) as threads:
        first = threads.submit(client.post, "/api/explain", files=form(pictures[0]))
        until(lambda: gauge(client, "batches_total") == 1)
        leaver = send_raw(client, pictures[1].read_bytes())
        last = threads.submit(client.post, "/api/explain", files=form(pictures[2]))
        until(lambda: gauge(client, "pictures_waiting") == 2)
        leaver.close()
        until(lambda: gauge(client, "pictures_waiting") == 1)
        assert gauge(client, "slots_taken") == 2
        go.set()
        assert first.result().status_code == last.result().status_code == 200
        assert gauge(client, "batched_pictures_total") == 2
        assert 'status="499"} 1' in client.get("/metrics").text


def test_a_failing_batch_is_told_and_the_next_one_served(run: TinyRun, pictures: list[Path]) -> None:
    classifier = load(run.path, "cpu")

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    handle = classifier.networks[0].register_forward_pre_hook(fail)
    with serving(classifier) as client:
        assert client.post("/api/explain", files=form(pictures[0])).status_code == 503
        handle.remove()
        assert client.post("/api/explain", files=form(pictures[0])).status_code == 200


def test_limits_of_bytes_pixels_number_and_time(run: TinyRun, pictures: list[Path], tmp_path: Path) -> None:
    limits = replace(PATIENT, file_bytes=60_000, request_bytes=100_000, pixels=200_000, files=2)
    Image.effect_noise((300, 300), 80).save(tmp_path / "heavy.png")
    Image.new("L", (600, 400)).save(tmp_path / "wide.png")
    assert (tmp_path / "heavy.png").stat().st_size > limits.file_bytes

    def endless() -> Iterator[bytes]:
        for _ in range(10_000):
            yield bytes(1000)

    with serving(load(run.path, "cpu"), limits=limits) as client:

        def status(**request: Any) -> int:
            return client.post("/api/explain", **request).status_code

        heavy = (tmp_path / "heavy.png").read_bytes()
        assert status(content=heavy) == 413
        assert status(files=form(tmp_path / "heavy.png")) == 413
        assert status(files=form(tmp_path / "wide.png")) == 413
        assert status(files=form(*pictures[:3])) == 400
        assert status(files=form(*pictures[:2])) == 200
        with suppress(httpx.TransportError):  # without a length; the server need not read on to refuse it
            assert status(content=endless()) == 413
        assert gauge(client, "slots_taken") == 0
        assert len(server_of(client).store) == 0, "what is only explained is not kept"
    with serving(load(run.path, "cpu"), limits=replace(PATIENT, upload_seconds=0.3)) as client:
        slow = send_raw(client, b"GIF89a", 500)
        assert slow.recv(12) == b"HTTP/1.1 408"
        slow.close()
        assert gauge(client, "slots_taken") == 0


def test_combined_networks_are_served_too(run: TinyRun, pictures: list[Path]) -> None:
    """Each with its own input; the points of both stand in one sheet."""
    first, second = load(run.path, "cpu"), load(run.path, "cpu")
    count = len(first.prototypes)
    prototypes = [*first.prototypes, *(replace(p, id=count + p.id, member=1) for p in second.prototypes)]
    both = Classifier(run.path, first.classes, [first.networks[0], second.networks[0]], prototypes)
    with serving(both) as client:
        (image,) = client.post("/api/explain", files=form(pictures[0])).json()["images"]
        alone = explain(first, pictures[0])
        assert image["predicted"] == alone.predicted.name
        assert image["classes"][0]["logit"] == pytest.approx(2 * alone.predicted.logit, abs=1e-4)
        (kept,) = client.post("/api/pictures", files=form(pictures[0])).json()["pictures"]
        shown = client.get(f"/api/pictures/{kept['id']}").json()
        numbers = {row["prototype"] for group in shown["sheets"][0]["groups"] for row in group["rows"]}
        assert max(numbers) >= count > min(numbers)
        assert client.get(f"/prototypes/{max(numbers)}/crop.jpg").status_code == 200
