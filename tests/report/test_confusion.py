"""The confusion matrix: every picture in its cell, and a click that shows them with their sheets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.browser import chromium
from helpers.runs import TINY, likethat, make_tiny_birds

from likethat.report.confusion import LISTED, confusion_matrix, to_explain
from likethat.runs.judged import JudgedImage


def judged(pairs: list[tuple[str, str | None]]) -> list[JudgedImage]:
    return [JudgedImage("test", f"{n}.jpg", true, guess, 0.5) for n, (true, guess) in enumerate(pairs)]


def test_every_picture_is_in_its_cell() -> None:
    pairs: list[tuple[str, str | None]] = [("a", "a")] * 3 + [("a", "b")] * 2 + [("b", "c"), ("c", "c"), ("c", None)]
    matrix = confusion_matrix(judged(pairs), ("a", "b", "c"))
    found = {(cell.row, cell.column): len(cell.images) for cell in matrix.cells}
    assert found == {(0, 0): 3, (0, 1): 2, (1, 2): 1, (2, 2): 1}, "whom nobody was asked about is left out"
    assert [(cell.row, cell.column) for cell in matrix.cells] == [(0, 1), (1, 2), (0, 0), (2, 2)], "wrong ones first"
    assert matrix.cells[0].share == pytest.approx(0.4)
    assert len(to_explain(matrix)) == 7


def test_a_report_of_many_wrong_pictures_stays_short() -> None:
    pairs: list[tuple[str, str | None]] = [("a", "b")] * (LISTED + 1) + [("b", "a")] * 3
    matrix = confusion_matrix(judged(pairs), ("a", "b"))
    assert [len(cell.images) for cell in matrix.listed] == [3]
    assert len(to_explain(matrix)) == 9, "some of every cell"


def test_a_click_on_a_cell_shows_its_pictures_with_their_sheets(tmp_path: Path) -> None:
    likethat("train", make_tiny_birds(tmp_path / "birds"), "--out", tmp_path / "run", *TINY, "--preset", "quick")
    page = tmp_path / "confusions.html"
    done = likethat("evaluate", tmp_path / "run", "--confusions", page, "--json", "--device", "cpu")
    evaluation = json.loads(done.stdout)
    true, guess, count = evaluation["confusions"][0]
    assert {"balanced_accuracy", "macro_f1"} <= evaluation["balanced"].keys()
    assert "balanced accuracy" in (tmp_path / "run" / "report.html").read_text()
    with chromium() as driver:
        driver.get(page.as_uri())
        shown = driver.execute_script(
            "return [...document.querySelectorAll('.cell')].filter(e => e.offsetHeight).length"
        )
        assert shown == 0
        cell = driver.find_element(
            "xpath", f"//*[name()='title'][contains(., 'of {true} (')][contains(., 'for {guess}')]/.."
        )
        cell.find_element("xpath", "./..").click()
        (opened,) = [part for part in driver.find_elements("class name", "cell") if part.is_displayed()]
        assert f"{true} taken for {guess}: {count} pictures" in opened.text
        assert opened.text.count("Wrong: it is") == count
        assert f"Why {guess} and not {true}" in opened.text
