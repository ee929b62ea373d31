"""Correcting in the browser: ban, undo, redo, name, replace, save; and nobody else can."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.browser import chromium
from helpers.page import Page
from helpers.runs import likethat, make_tiny_run
from helpers.serving import form, serving, until

from likethat.runs.classifier import load
from likethat.workflows.edit.editor import open_editor

NASTY = "<img src=x onerror=alert(1)> & 'crown'"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("correct"))


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Corrector:
    """A client that corrects as the page does."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.headers = {"X-Likethat-Edit": client.get("/api/run").json()["edit_token"]}

    def post(self, path: str = "", **body: Any) -> httpx.Response:
        return self.client.post(f"/api/edit{path}", json=body, headers=self.headers)

    def open(self) -> dict[str, Any]:
        self.post("/open")
        until(lambda: self.state()["state"] in ("done", "failed"))
        return self.state()

    def state(self) -> dict[str, Any]:
        document: dict[str, Any] = self.client.get("/api/edit").json()
        return document

    def change(self, kind: str, *prototypes: int, **more: Any) -> dict[str, Any]:
        body = {"kind": kind, "prototypes": prototypes, "who": "Ada", "revision": self.state()["revision"], **more}
        answer = self.post(**body)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document


def test_the_api_corrects_as_the_editor_does(run: Path) -> None:
    before = digests(run)
    with serving(load(run, "cpu")) as client, open_editor(run, device="cpu") as editor:
        corrector = Corrector(client)
        assert corrector.state()["state"] == "closed"
        picture = next((run.parent / "birds" / "test").rglob("*.jpg"))
        (kept,) = client.post("/api/pictures", files=form(picture)).json()["pictures"]
        assert client.get(f"/api/edit/effect/{kept['id']}").status_code == 409, "not opened yet"
        state = corrector.open()
        assert state["before"] == state["after"] == editor.state.val
        assert state["history"] == []

        corrector.change("ban", 4, why="a ruler")
        state = corrector.change("name", 0, text=NASTY)
        editor.ban(4, why="a ruler", who="Ada")
        editor.name(0, NASTY, who="Ada")
        assert state["after"] == editor.state.val
        assert [(edit["text"], edit["who"], edit["why"]) for edit in state["history"]] == [
            ("banned 4", "Ada", "a ruler"),
            (f"called 0 “{NASTY}”", "Ada", ""),
        ]
        assert [entry["id"] for entry in state["prototypes"]] == [p.id for p in editor.classifier.prototypes]
        effect = client.get(f"/api/edit/effect/{kept['id']}").json()
        expected = editor.effect(editor.original.prepare(picture))
        assert effect == json.loads(json.dumps(expected))

        offered = client.get("/api/edit/candidates/2").json()
        assert [found["path"] for found in offered] == [editor.sample(c).path for c in editor.candidates(2)]
        assert client.get(offered[0]["picture"]).headers["content-type"] == "image/jpeg"
        old = client.get("/edit/prototypes/2/source.jpg").content
        elsewhere = next(n for n, found in enumerate(offered) if found["path"] != state["prototypes"][2]["path"])
        state = corrector.change("replace", 2, candidate=elsewhere)
        assert state["prototypes"][2]["path"] == offered[elsewhere]["path"]
        assert client.get(state["prototypes"][2]["source"]).content != old
        assert client.get("/prototypes/2/source.jpg").content == old, "the served run is as it was"
        state = corrector.change("undo")
        assert [edit["kind"] for edit in state["undone"]] == ["replace"]
        assert corrector.change("redo")["history"][-1]["kind"] == "replace"

        answer = corrector.post("/save", name="corrected", revision=corrector.state()["revision"])
        assert answer.status_code == 201
        saved = load(run.parent / "corrected", "cpu")
        assert saved.prototypes[0].name == NASTY
        lines = (run.parent / "corrected" / "edits.jsonl").read_text().splitlines()
        assert [json.loads(line)["kind"] for line in lines] == ["ban", "name", "replace"]
        likethat("verify", run.parent / "corrected", "--device", "cpu")
    assert digests(run) == before, "the original is never touched"


def test_several_prototypes_get_one_name_in_one_correction(run: Path) -> None:
    with serving(load(run, "cpu")) as client:
        corrector = Corrector(client)
        corrector.open()
        state = corrector.change("name", 1, 4, 5, text="crown")
        assert {entry["id"] for entry in state["prototypes"] if entry["name"] == "crown"} == {1, 4, 5}
        assert [edit["text"] for edit in state["history"]] == ["called 1, 4, 5 “crown”"]
        assert {entry["name"] for entry in corrector.change("undo")["prototypes"]} == {None}
        two = {"kind": "replace", "prototypes": [1, 4], "who": "Ada", "revision": corrector.state()["revision"]}
        assert corrector.post(**two).status_code == 422, "not the first one alone, silently"


def test_the_command_for_a_saved_run_can_be_pasted(run: Path) -> None:
    with serving(load(run, "cpu")) as client:
        corrector = Corrector(client)
        corrector.open()
        corrector.change("name", 0, text="crown")
        answer = corrector.post("/save", name="my own", revision=corrector.state()["revision"])
        assert shlex.split(answer.json()["command"]) == ["likethat", "serve", str(run.resolve().parent / "my own")]


def test_what_is_refused(run: Path) -> None:
    (run.parent / "taken").mkdir()
    with serving(load(run, "cpu")) as client:
        corrector = Corrector(client)
        body = {"kind": "ban", "prototypes": [1], "who": "Eve", "revision": 0}
        paths = ("/api/edit", "/api/edit/open", "/api/edit/save")
        for headers in ({}, {"X-Likethat-Edit": ""}, {"X-Likethat-Edit": "guess"}):
            assert {client.post(path, json=body, headers=headers).status_code for path in paths} == {403}
        crossing = {**corrector.headers, "Origin": "http://evil.example"}
        assert {client.post(path, json=body, headers=crossing).status_code for path in paths} == {403}
        assert corrector.state()["state"] == "closed", "nothing was even opened"
        assert corrector.post(**body).status_code == 409

        corrector.open()
        mistakes: list[tuple[dict[str, Any], int, str]] = [
            ({"who": " "}, 422, "say who you are"),
            ({"prototypes": []}, 422, "No prototype"),
            ({"prototypes": [999]}, 422, "no prototype 999"),
            ({"prototypes": [0, 1, 2]}, 422, "last prototype"),
            ({"prototypes": [0, 3], "kind": "merge"}, 422, "one class"),
            ({"kind": "replace", "candidate": 99}, 404, "no candidate 99"),
            ({"kind": "undo"}, 422, "no edit to undo"),
            ({"kind": "name", "text": "x" * 300}, 422, "letters"),
            ({"kind": "format"}, 422, "kind"),
            ({"revision": 7}, 409, "Somebody else"),
        ]
        for change, status, words in mistakes:
            answer = corrector.post(**{**body, **change})
            assert (answer.status_code, words in answer.json()["detail"]) == (status, True), (change, answer.text)
        assert corrector.state()["revision"] == 0, "nothing changed"
        corrector.change("ban", 1)
        assert corrector.post(**body).status_code == 409, "somebody was faster"
        for name in (
            "",
            "..",
            ".",
            "../x",
            "a/b",
            "a\\b",
            "/tmp/x",
            "x\0y",
            ".hidden",
            "x" * 65,
            "a\n",
            "taken",
            "run",
        ):
            answer = corrector.post("/save", name=name, revision=1)
            assert answer.status_code in (409, 422), name
        assert {path.name for path in run.parent.iterdir()} <= {"birds", "run", "taken", "corrected", "my own"}


def test_missing_images_are_told(run: Path, tmp_path: Path) -> None:
    with serving(load(run, "cpu"), data=str(tmp_path / "nowhere")) as client:
        state = Corrector(client).open()
        assert state["state"] == "failed"
        assert "nowhere" in state["problem"]


def test_correcting_in_the_browser(run: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    shutil.rmtree(run.parent / "run-corrected", ignore_errors=True)
    pictures = sorted((run.parent / "birds" / "test").rglob("*.jpg"))
    with serving(load(run, "cpu")) as client, chromium() as driver:
        page = Page(driver, client)
        page.open("/", ".zone")
        page.upload(pictures[0])
        page.all(".evidence-row")
        page.open("/correct", ".start button")
        page.click(".start button")
        cards = page.all(".pick")
        assert len(cards) == 9
        assert page.all("#undo:disabled, #redo:disabled")
        assert "Your picture" in page.text(".effect")

        chosen = driver.current_url.partition("prototype=")[2].partition("&")[0]
        page.click("#ban")
        assert page.one("#who:invalid"), "it must be said who corrects"
        page.one("#who").send_keys("Ada Byron")
        page.click(".reasons button")
        page.click("#ban")
        page.until(lambda: len(page.all(".pick")) == 8, "one less")
        assert f"Banned {chosen}" in page.text(".done")
        assert "Ada Byron" in page.text("#history")
        assert ": background" in page.text("#history")
        page.until(lambda: "→" in page.text(".effect table"), "the picture before and after")
        driver.refresh()
        assert len(page.all(".pick")) == 8, "corrections outlive a reload"
        page.click("#undo")
        page.until(lambda: len(page.all(".pick")) == 9, "it is back")
        assert "undone" in page.text("#history")
        page.click("#redo")
        page.until(lambda: len(page.all(".pick")) == 8, "gone again")

        page.one("#name").send_keys(NASTY, Keys.ENTER)
        page.until(lambda: NASTY in page.text(".panel h2"), "its name")
        page.click("#replace summary")
        page.click("#replace .choice")
        page.until(lambda: "Replaced" in page.text(".done"), "another patch")
        page.click(".panel details summary")  # merging
        page.click(".choice input")
        page.click(".panel details button:not(.choice)")
        page.until(lambda: len(page.all(".pick")) == 7, "two became one")

        page.click(".saver summary")
        page.click(".saver form .primary")
        page.until(lambda: "Saved as run-corrected" in page.text("[aria-live] .done, .saved"), "the new run")
        kinds = [json.loads(line)["kind"] for line in (run.parent / "run-corrected" / "edits.jsonl").open()]
        assert kinds == ["ban", "name", "replace", "merge"]
        page.click(".saver summary")
        page.click(".saver form .primary")
        page.until(lambda: "choose another name" in page.text(".problem"), "that the name is taken")
        severe = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert not [entry for entry in severe if entry["source"] != "network"]


def test_correcting_with_the_keyboard_alone(run: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    with serving(load(run, "cpu")) as client, chromium() as driver:
        page = Page(driver, client)
        Corrector(client).open()
        page.open("/correct", ".pick")

        def tab_to(selector: str) -> None:
            for _ in range(60):
                page.press(Keys.TAB)
                if driver.execute_script("return document.activeElement.matches(arguments[0])", selector):
                    return
            raise AssertionError(f"{selector} is not reached by Tab")

        tab_to(".pick:nth-child(2)")
        second = driver.execute_script("return document.activeElement.dataset.prototype")
        page.press(Keys.ENTER)
        page.until(lambda: f"prototype={second}" in driver.current_url, "the second one chosen")
        assert driver.execute_script("return document.activeElement.dataset.prototype") == second, "focus stays"
        tab_to("#who")
        page.press("Ada")
        tab_to("#ban")
        page.press(Keys.ENTER)
        page.until(lambda: len(page.all(".pick")) == 8, "it is banned")


def test_neighbours_are_searched_for_on_request(run: Path) -> None:
    before = digests(run)
    with serving(load(run, "cpu")) as client, chromium() as driver:
        page = Page(driver, client)
        assert client.post("/api/atlas").status_code == 403
        page.open("/prototypes/1", "#search-neighbours")
        page.click("#search-neighbours")
        assert len(page.all(".neighbours li")) == 10
        entry = client.get("/api/prototypes/1").json()
        assert entry["purity"] == sum(found["class"] == entry["class"] for found in entry["train"]) / 5
        assert client.get(entry["val"][0]["picture"]).headers["content-type"] == "image/webp"
    assert digests(run) == before
