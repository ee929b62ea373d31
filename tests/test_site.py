"""The site that `make docs` makes: complete, without warnings, and readable from the disk without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from helpers.browser import PATIENCE, chromium

import likethat

ROOT = Path(__file__).parents[1]
LOADED_BY = {"src", "srcset", "poster", "data"}  # attributes whose address a browser loads when it shows the page
ADDRESS_IN_CSS = re.compile(r"(?:url\(|@import)\s*[\"']?([^\"')]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "warning" not in said.lower(), said
    return folder


class Addresses(HTMLParser):
    """Collects what a page loads, what it links to, and the names that links may lead to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in LOADED_BY or (tag == "link" and name == "href"):
                self.loaded.append(value or "")
            elif name == "href":
                self.linked.append(value or "")
            elif name == "id":
                self.anchors.add(value or "")
            elif name == "style":
                self.loaded += ADDRESS_IN_CSS.findall(value or "")


def pages(site: Path) -> Iterator[tuple[Path, Addresses]]:
    for page in sorted(site.rglob("*.html")):
        if page.name != "404.html":  # a server's answer, whose links start at the server's root
            yield page, Addresses(page)


def is_elsewhere(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    loaded = [(page, address) for page, found in pages(site) for address in found.loaded]
    loaded += [
        (sheet, address)
        for sheet in site.rglob("*.css")
        for address in ADDRESS_IN_CSS.findall(sheet.read_text(encoding="utf-8"))
    ]
    assert len(loaded) > 100
    assert [found for found in loaded if is_elsewhere(found[1])] == []
    missing = [
        (page, address)
        for page, address in loaded
        if not address.startswith("data:") and not (page.parent / unquote(urlsplit(address).path)).is_file()
    ]
    assert missing == []


def test_links_lead_to_pages_and_headings_that_exist(site: Path) -> None:
    found = {page.resolve(): addresses for page, addresses in pages(site)}
    broken = []
    for page, addresses in found.items():
        for address in addresses.linked:
            if is_elsewhere(address):
                continue
            parts = urlsplit(address)
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if target not in found or (parts.fragment and unquote(parts.fragment) not in found[target].anchors):
                broken.append((page.name, address))
    assert broken == []


def test_every_public_name_and_every_module_is_in_the_reference(site: Path) -> None:
    public = Addresses(site / "api" / "index.html").anchors
    assert {f"likethat.{name}" for name in likethat.__all__ if name != "__version__"} <= public
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    package = ROOT / "src" / "likethat"
    modules = [path.relative_to(package).with_suffix("") for path in package.rglob("*.py") if path.name[0] != "_"]
    assert [module for module in modules if f">{'.'.join(module.parts)}<" not in text] == []


def test_search_works_from_the_disk(site: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    with chromium() as driver:
        wait = WebDriverWait(driver, PATIENCE)
        driver.get((site / "guide.html").as_uri())
        driver.find_element("partial link text", "Search").click()
        query = driver.find_element("id", "mkdocs-search-query")
        wait.until(lambda _: query.is_displayed())

        def results(text: str) -> list[str]:
            query.clear()
            query.send_keys(text)
            wait.until(lambda _: driver.find_elements("css selector", "#mkdocs-search-results > *"))
            links = driver.find_elements("css selector", "#mkdocs-search-results a")
            return [link.get_attribute("href").removeprefix(site.as_uri() + "/") for link in links]

        assert results("no_such_word_anywhere") == []
        assert "guide.html#promises" in results("conformal predic")
        assert results("from_pretrained")[0] == "api/index.html#likethat.Classifier.from_pretrained"
        driver.find_element("css selector", "#mkdocs-search-results a").click()
        wait.until(lambda _: "api/index.html" in driver.current_url)
        assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
