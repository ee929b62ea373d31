"""The page in a real Chromium: asking, pointing, comparing, browsing, with the mouse and with the keyboard alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest
import torch
from helpers.browser import chromium
from helpers.explain_run import make_run
from helpers.names import CLASS, FILE, needs_such_names
from helpers.page import Page
from helpers.runs import likethat, make_tiny_run
from helpers.serving import server_of, serving
from PIL import Image

from likethat.explaining.explanation import explain
from likethat.runs.calibration import Calibration
from likethat.runs.classifier import load


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_tiny_run(tmp_path_factory.mktemp("page"))
    likethat("atlas", run, "--device", "cpu", "--k", 3)
    return run


@pytest.fixture(scope="module")
def pictures(run: Path) -> list[Path]:
    return sorted((run.parent / "birds" / "test").rglob("*.jpg"))


@pytest.fixture(scope="module")
def client(run: Path) -> Iterator[httpx.Client]:
    with serving(load(run, "cpu")) as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@pytest.fixture
def page(browser: Any, client: httpx.Client) -> Iterator[Page]:
    yield Page(browser, client)
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    # Answers that say no are told to the log by the browser itself; broken scripts and policies must not be there.
    assert not [entry for entry in severe if entry["source"] != "network"], severe


def test_upload_point_switch_compare_and_reload(
    page: Page, client: httpx.Client, run: Path, pictures: list[Path]
) -> None:
    page.open("/", ".zone")
    page.upload(pictures[0])
    rows = page.rows()
    prediction = load(run, "cpu").predict(pictures[0])
    best = prediction.class_name.replace("_", " ")
    assert best in page.text("h1")
    assert f"{100 * prediction.probability:.1f} %" in page.text("h1")
    assert len(page.all(".classes li")) == len(prediction.probabilities)
    second = sorted(prediction.probabilities, key=prediction.probabilities.__getitem__)[-2].replace("_", " ")
    assert page.text(".evidence h2") == f"Why {best} and not {second}", "what decides comes first"

    answer = client.get("/api/pictures/" + page.driver.current_url.rpartition("/")[2]).json()
    boxes = []
    for row in rows[:2]:
        page.point_at(row)
        match = answer["matches"][row.get_attribute("data-prototype")]
        x0, y0, x1, y1 = match["box"]
        assert page.box(0) == pytest.approx([x0, y0, x1 - x0, y1 - y0])
        x0, y0, x1, y1 = match["source_box"]
        assert page.box(1) == pytest.approx([x0, y0, x1 - x0, y1 - y0])
        assert page.all(".two-up img")[-1].get_attribute("src").endswith(match["source"])
        boxes.append(page.box(1))
    assert boxes[0] != boxes[1]

    page.all(".segments label")[2].click()
    assert len(page.all(".cells i")) == sum(map(len, match["map"]))
    assert "view=grid" in page.driver.current_url
    page.all(".segments label")[0].click()
    before = page.box(0)
    page.driver.execute_script(
        "const s = document.getElementById('percentile'); s.value = 60; s.dispatchEvent(new Event('input'))"
    )
    page.until(lambda: page.box(0) and page.box(0)[2] * page.box(0)[3] > 1.5 * before[2] * before[3], "a larger box")
    assert "percentile=60" in page.driver.current_url
    assert page.text(".slider:has(#percentile)").split() == ["Box", "around", "the", "strongest", "40", "%"]

    other = page.all(".classes a")[1]
    name = other.find_element("css selector", "span").text
    other.click()
    page.until(lambda: page.text(".evidence h2") == f"Evidence for {name}", "the other class")
    assert best in page.text("h1"), "the verdict is still the model's"
    page.click("#compare option[value]:nth-child(2)")
    page.until(lambda: "and not" in page.text(".evidence h2"), "the comparison")
    address, shown = page.driver.current_url, page.text(".evidence")
    page.driver.refresh()
    page.all(".evidence-row")
    assert page.driver.current_url == address
    assert page.text(".evidence") == shown
    page.driver.back()
    page.until(lambda: page.text(".evidence h2") == f"Evidence for {name}", "the page before")


def test_the_network_is_asked_where_the_evidence_lies(page: Page, run: Path, pictures: list[Path]) -> None:
    page.open("/", ".zone")
    page.upload(pictures[0])
    page.all(".evidence-row")
    for method in ("gradient", "occlusion"):
        page.click(f"#attribution option[value={method}]")
        sheets = explain(load(run, "cpu"), pictures[0], attribution=method).classes[:2]
        boxes = {str(row.match.prototype.id): row.match.share for sheet in sheets for row in sheet.rows}

        def is_lit(boxes: dict[str, Any] = boxes) -> bool:
            row = page.one(".evidence-row")
            page.point_at(row)
            x0, y0, x1, y1 = boxes[row.get_attribute("data-prototype")]
            return page.box(0) == pytest.approx([x0, y0, x1 - x0, y1 - y0])

        page.until(is_lit, f"the box that {method} finds")
        assert f"attribution={method}" in page.driver.current_url
    address = page.driver.current_url
    page.driver.get(address.replace("occlusion", "guessing"))
    page.until(
        lambda: "choose one of upsampling, gradient, occlusion" in page.text("main"), "the problem in a sentence"
    )


def test_lines_are_groups_that_open(page: Page, run: Path, pictures: list[Path]) -> None:
    classifier = load(run, "cpu")
    sheets = (
        (picture, sheet) for picture in pictures for sheet in explain(classifier, picture, top_classes=99).classes
    )
    picture, sheet = next(found for found in sheets if any(len(group.rows) > 1 for group in found[1].groups))
    page.open("/", ".zone")
    page.upload(picture)
    page.all(".evidence-row")
    page.open(f"{page.driver.current_url.removeprefix(page.base)}?class={sheet.name}", ".evidence-row")
    lines = page.all(".evidence-rows > li")
    assert len(lines) == len(sheet.groups)
    for line, group in zip(lines, sheet.groups, strict=True):
        shown = line.find_element("css selector", ".line-row .sum .was").text
        assert shown == f"{group.points:.2f}".replace("-", "−")
        members = line.find_elements("css selector", ".row-members .evidence-row")
        assert [int(m.get_attribute("data-prototype")) for m in members] == (
            [row.match.prototype.id for row in group.rows] if len(group.rows) > 1 else []
        )
        assert not any(member.is_displayed() for member in members)
    page.click(".row-members summary")
    page.until(lambda: page.all(".row-members .evidence-row")[0].is_displayed(), "the members")


def test_a_hidden_part_changes_the_points_live(
    page: Page, client: httpx.Client, run: Path, pictures: list[Path]
) -> None:
    classifier = load(run, "cpu")
    width, height = Image.open(pictures[0]).size
    page.open("/", ".zone")
    page.upload(pictures[0])
    before = explain(classifier, pictures[0])
    page.all(".evidence-row")
    address = page.driver.current_url.removeprefix(page.base)
    page.open(f"{address}?class={before.predicted.name}", ".evidence-row")
    lead = before.predicted.groups[0].lead.match

    def expected(*shares: tuple[float, ...]) -> tuple[str, list[str]]:
        """What is left of each line and of the total, by Python."""
        boxes = [(x0 * width, y0 * height, x1 * width, y1 * height) for x0, y0, x1, y1 in shares]
        after = explain(classifier, pictures[0], top_classes=99, hide=boxes)
        sheet = after.sheet(before.predicted.name)
        points = {row.match.prototype.id: row.points for row in sheet.rows}
        lines = [sum(points[row.match.prototype.id] for row in group.rows) for group in before.predicted.groups]
        return after.predicted.name, [f"{value:.2f}".replace("-", "−") for value in (*lines, sheet.logit)]

    def shown() -> list[str]:
        rows = "'.line-row .still, .totals .total .still'"
        script = f"return [...document.querySelectorAll({rows})].map(e => e.textContent)"
        found: list[str] = page.driver.execute_script(script)
        return found

    def told(name: str) -> bool:
        same = name == before.predicted.name
        return ("stays" if same else "changes to") + " " + name.replace("_", " ") in page.text(".outcome")

    page.click(".hide-part")
    name, values = expected(lead.share)
    page.until(lambda: shown() == values, f"{values} instead of {shown()}")
    assert told(name)
    assert len(page.all(".covers i")) == 1
    assert page.text(".hide-part") == "Show"
    page.drag(".two-up .stage", (0.1, 0.1), (0.4, 0.6))
    page.until(lambda: len(page.all(".covers i")) == 2, "the drawn part")
    address = page.driver.current_url
    parts = [tuple(map(float, text.split(","))) for text in parse_qs(address.partition("?")[2])["hide"]]
    assert parts[1] == pytest.approx((0.1, 0.1, 0.4, 0.6), abs=0.01)
    name, values = expected(*parts)
    page.until(lambda: shown() == values, f"{values} instead of {shown()}")
    assert told(name)

    document = client.get(next(a.get_attribute("href") for a in page.all(".downloads a") if a.text == "JSON"))
    assert document.json()["predicted"] == name
    assert len(document.json()["hidden"]) == 2
    page.driver.refresh()
    page.until(lambda: shown() == values, "the same after a reload")
    assert page.driver.current_url == address
    page.click("#undo-hiding")
    _, values = expected(lead.share)
    page.until(lambda: shown() == values, "the part of the line alone")
    page.click("#clear-hiding")
    page.until(lambda: set(shown()) == {""}, "the whole picture")
    assert "hide=" not in page.driver.current_url
    assert not page.driver.find_elements("css selector", ".covers i")


def test_downloads_are_the_commands_files(page: Page, client: httpx.Client, run: Path, pictures: list[Path]) -> None:
    page.open("/", ".zone")
    page.upload(pictures[1])
    links = [link.get_attribute("href") for link in page.all(".downloads a")]
    document = client.get(next(link for link in links if ".json" in link)).json()
    expected = explain(load(run, "cpu"), pictures[1])
    assert document == {**json.loads(json.dumps(expected.to_dict())), "path": pictures[1].name}
    sheet = client.get(next(link for link in links if ".png" in link))
    assert sheet.content.startswith(b"\x89PNG")
    html = client.get(next(link for link in links if ".html" in link))
    assert f"Evidence for {expected.predicted.name}" in html.text


def test_several_pictures_one_of_them_broken(page: Page, pictures: list[Path], tmp_path: Path) -> None:
    (tmp_path / "notes.jpg").write_text("a robin")
    page.driver.execute_script("sessionStorage.clear()")
    page.open("/", ".zone")
    page.upload(pictures[2], tmp_path / "notes.jpg", pictures[3])
    assert "notes.jpg" in page.text(".problem")
    film = page.all(".film a")
    assert len(film) == 2
    film[1].click()
    page.until(lambda: page.all(".film a")[1].get_attribute("aria-current") == "page", "the second picture")
    page.upload(tmp_path / "notes.jpg")
    page.until(lambda: "not a readable" in page.text(".zone .problem"), "what is wrong")


def test_a_pasted_picture(page: Page, tmp_path: Path) -> None:
    page.open("/", ".zone")
    page.driver.execute_script("""
        const canvas = document.createElement("canvas");
        canvas.width = 90; canvas.height = 60;
        canvas.getContext("2d").fillRect(10, 10, 30, 30);
        canvas.toBlob((blob) => {
          const data = new DataTransfer();
          data.items.add(new File([blob], "image.png", { type: "image/png" }));
          document.body.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true }));
        });
    """)
    assert page.all(".evidence-row")


def test_what_is_gone_says_so(page: Page, client: httpx.Client, pictures: list[Path]) -> None:
    page.open("/", ".zone")
    page.upload(pictures[0])
    page.all(".evidence-row")
    server_of(client).store.by_id.clear()  # as after an hour
    page.driver.refresh()
    assert "not kept any more" in page.text(".problem")
    page.open("/else/where", ".calm")
    assert "There is no such page" in page.text("h1")
    page.open("/prototypes/9999", ".problem")
    assert "There is no prototype 9999" in page.text(".problem")


def test_keyboard_alone(page: Page, pictures: list[Path]) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open("/", ".zone")
    page.press(Keys.TAB)
    assert page.driver.execute_script("return document.activeElement.className") == "skip"
    for _ in range(6):
        page.press(Keys.TAB)
        if page.focused() == "choose":
            break
    assert page.focused() == "choose", "the chooser is reached by Tab"
    page.upload(pictures[0])  # what the system's file dialogue would do
    rows = page.all(".line-row .evidence-row")
    if len(rows) == 1:  # one part for all: the next line is inside of it
        rows = [rows[0], page.rows()[0]]
    for _ in range(40):
        page.press(Keys.TAB)
        if page.focused() == rows[0].get_attribute("data-prototype"):
            break
    page.press(Keys.ARROW_DOWN)
    second = rows[1].get_attribute("data-prototype")
    assert page.focused() == second
    assert "lit" in rows[1].get_attribute("class")
    assert f"/prototypes/{second}" in page.one(".two-up a").get_attribute("href")
    page.driver.execute_script("document.getElementById('compare').focus()")
    page.press(Keys.ARROW_DOWN)
    page.until(lambda: "and not" in page.text(".evidence h2"), "the comparison")
    page.until(lambda: page.focused() == "compare", "focus where it was")
    unnamed = page.driver.execute_script("""
        const name = (e) => e.getAttribute("aria-label") || e.title || e.textContent.trim() ||
          [...(e.labels ?? [])].map((label) => label.textContent).join("") || e.querySelector("img")?.alt;
        const all = [...document.querySelectorAll("a, button, input, select, summary")];
        return all.filter((e) => !name(e)).map((e) => e.outerHTML);
    """)
    assert unnamed == [], "a screen reader needs a name for each"
    assert page.driver.execute_script("return [...document.images].every((i) => i.hasAttribute('alt'))")


def test_browse_search_and_one_prototype(page: Page, client: httpx.Client, run: Path) -> None:
    prototypes = client.get("/api/prototypes").json()["prototypes"]
    page.open("/browse", ".card")
    assert len(page.all(".card")) == len(prototypes)
    name = prototypes[0]["class"]
    page.one("#search").send_keys(name.replace("_", " ")[:6])
    own = [entry for entry in prototypes if name[:6].lower() in entry["class"].replace("_", " ").lower()]
    page.until(lambda: len(page.all(".card")) == len(own), "those of the class")
    address = page.driver.current_url
    assert "search=" in address
    page.driver.refresh()
    assert len(page.all(".card")) == len(own)
    page.click(".card")
    page.all(".one-prototype")
    entry = client.get(page.driver.current_url.replace("/prototypes/", "/api/prototypes/")).json()
    assert len(page.all(".neighbours li")) == len(entry["train"]) + len(entry["val"])
    page.until(
        lambda: page.driver.execute_script(
            "return [...document.images].filter(i => i.loading != 'lazy').every(i => i.complete && i.naturalWidth)"
        ),
        "all pictures",
    )
    assert entry["train"][0]["path"] == entry["path"], "a prototype is its own nearest patch"
    thumbnail = client.get(entry["train"][0]["picture"])
    assert thumbnail.headers["content-type"] == "image/webp"
    page.driver.back()
    page.until(lambda: page.driver.current_url == address and len(page.all(".card")) == len(own), "the list again")
    page.one("#search").send_keys("zzz")
    assert "No prototype matches" in page.text(".calm")


@pytest.mark.parametrize("width", [360, 700])
def test_narrow_windows_need_no_sideways_scrolling(page: Page, pictures: list[Path], width: int) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.open("/", ".zone")
        page.upload(pictures[0])
        for path, wait in (
            (None, ".evidence-row"),
            ("/browse", ".card"),
            ("/prototypes/1", ".one-prototype"),
            ("/api", ".docs"),
        ):
            if path:
                page.open(path, wait)
            page.all(wait)
            wide = page.driver.execute_script("return document.documentElement.scrollWidth")
            assert wide <= width, path
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def luminance(colour: tuple[float, ...]) -> float:
    parts = [c / 255 for c in colour]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(page: Page, pictures: list[Path], scheme: str) -> None:
    feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
    page.open("/", ".zone")
    page.upload(pictures[0])
    page.all(".evidence-row")
    found = page.driver.execute_script("""
        const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
        function rgb(colour) {
          canvas.clearRect(0, 0, 1, 1);
          canvas.fillStyle = colour;
          canvas.fillRect(0, 0, 1, 1);
          return [...canvas.getImageData(0, 0, 1, 1).data];
        }
        function ground(e) {
          const colour = rgb(getComputedStyle(e).backgroundColor);
          return colour[3] > 250 ? colour : e.parentElement ? ground(e.parentElement) : [255, 255, 255, 255];
        }
        const shown = (e) => e.checkVisibility() && !e.closest(".cells, .unseen, .skip");
        const has_text = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        return [...document.querySelectorAll("body *")].filter((e) => shown(e) && has_text(e))
          .map((e) => [e.textContent.trim().slice(0, 30), rgb(getComputedStyle(e).color), ground(e)]);
    """)
    assert len(found) > 30
    for text, ink, ground in found:
        light, dark = sorted((luminance(tuple(ink[:3])), luminance(tuple(ground[:3]))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ink, ground)


def test_what_the_run_promises_is_told(browser: Any, run: Path, pictures: list[Path]) -> None:
    classifier = load(run, "cpu")
    nothing_is_like = Calibration((0.0,) * 99, (1e9,) * 99)
    every_class_fits = Calibration((1.0,) * 99, (-1e9,) * 99)
    best_alone = Calibration((1 - 1e-12,) * 99, (-1e9,) * 99)  # of a certain prediction
    with serving(classifier) as client:
        page = Page(browser, client)
        page.open("/", ".zone")
        page.upload(pictures[0])
        page.all(".pledge")

        def told(calibration: Calibration | None, level: str = "") -> str:
            classifier.calibration = calibration
            page.open(f"{page.driver.current_url.removeprefix(page.base).partition('?')[0]}{level}", ".pledge")
            return page.text(".pledge")

        assert "likethat calibrate" in told(None)
        text = told(nothing_is_like)
        assert "Unlike everything the model knows" in text
        assert page.text(".pledge a").lower().startswith("prototype ")
        assert "nearest class" in page.text(".verdict-bar")
        assert told(every_class_fits).startswith(f"One of these {len(classifier.classes)}: ")
        assert "too few validation pictures" in told(Calibration((0.5,), (0.0,)))
        with torch.no_grad():
            classifier.networks[0].last_layer.weight.mul_(1000)
        assert told(best_alone, "?level=0.9").startswith("Only ")
        assert " remains plausible." in page.text(".pledge")
        assert "Confidence level" in page.text(".pledge label")
        assert "90 %" in page.text(".pledge option:checked")


def test_names_are_text_and_never_markup(browser: Any, tmp_path: Path) -> None:
    nasty = '<img src=x onerror="document.title=1">'
    run = make_run(tmp_path, ("finch", nasty, "wren"))
    with serving(load(run.path, "cpu")) as client:
        page = Page(browser, client)
        page.open("/", ".zone")
        assert nasty in page.text(".chips")
        picture = tmp_path / "b&<b>.png"
        picture.write_bytes((run.root / run.samples[3].path).read_bytes())
        page.upload(picture)
        assert nasty in page.text(".classes")
        for path, wait in (("/browse", ".card"), ("/prototypes/2", ".one-prototype"), ("/api", ".docs")):
            page.open(path, wait)
        page.open("/browse", ".card")
        assert nasty in page.text(".browse-list")
        assert not page.driver.find_elements("css selector", "img[src=x]")


def test_the_token_is_asked_for_in_the_browser(browser: Any, run: Path) -> None:
    with serving(load(run, "cpu"), token="a token for this test") as client:
        page = Page(browser, client)
        page.open("/browse", "input[type=password]")
        page.one("input[type=password]").send_keys("wrong")
        page.click("button")
        assert "not the token" in page.text("[role=alert]")
        page.one("input[type=password]").send_keys("a token for this test")
        page.click("button")
        assert page.all(".card"), "the page that was wanted"


def test_names_that_are_not_valid_unicode_have_pages(browser: Any, tmp_path: Path) -> None:
    needs_such_names(tmp_path)
    made = make_run(tmp_path, ("finch", CLASS, "wren"), ending=FILE)
    shown = CLASS.replace("\udcf6", "\ufffd")
    with serving(load(made.path, "cpu")) as client:
        page = Page(browser, client)
        page.open("/", ".chips a")
        page.click(".chips li:nth-child(2) a")
        page.until(lambda: page.text(".browse-list h2").startswith(shown), "the class alone")
        assert len(page.all(".browse-list h2")) == 1
        page.click(".browse-list .card")
        page.until(lambda: page.text(".one-prototype .soft") == f"A part of {shown}", "its prototype")
        page.open("/", ".zone")
        page.upload(shutil.copy(made.root / made.samples[0].path, tmp_path / "mine.png"))
        page.all(".evidence-row")
        script = "[...document.querySelectorAll('.classes a')].find(a => a.innerText.toWellFormed().startsWith"
        page.driver.execute_script(f"{script}(arguments[0])).click()", shown)
        page.until(lambda: page.text(".evidence-head h2") == f"Evidence for {shown}", "its evidence")
