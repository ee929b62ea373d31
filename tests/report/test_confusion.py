"""The confusion matrix: every picture in its cell, and a click that shows them with their sheets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import chromium
from helpers.runs import QUICK, likethat, make_tiny_run

from likethat.report.confusion import confusion_matrix, to_explain
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
    assert len(to_explain(matrix, 100)) == 7


def test_a_page_of_few_sheets_has_one_of_every_cell_and_wrong_ones_first() -> None:
    pairs: list[tuple[str, str | None]] = [("a", "b")] * 50 + [("b", "a")] * 3 + [("a", "a")] * 5
    matrix = confusion_matrix(judged(pairs), ("a", "b"))
    assert [image.path for image in to_explain(matrix, 3)] == ["0.jpg", "50.jpg", "1.jpg"]
    chosen = to_explain(matrix, 100)
    assert [(image.class_name, image.predicted) for image in chosen].count(("a", "b")) == 6
    assert len(chosen) == 6 + 3 + 5


def test_a_click_on_a_cell_shows_its_pictures_with_their_sheets(tmp_path: Path) -> None:
    make_tiny_run(tmp_path, QUICK)
    page = tmp_path / "confusions.html"
    done = likethat("evaluate", tmp_path / "run", "--confusions", page, "--json", "--device", "cpu")
    evaluation = json.loads(done.stdout)
    true, guess, count = evaluation["confusions"][0]
    assert {"balanced_accuracy", "macro_f1"} <= evaluation["balanced"].keys()
    assert "balanced accuracy" in (tmp_path / "run" / "report.html").read_text()
    with chromium() as driver:
        driver.get(page.as_uri())
        assert not shown_cells(driver)
        click_cell(driver, true, guess)
        (opened,) = shown_cells(driver)
        assert f"{true} taken for {guess}: {count} pictures" in opened.text
        assert opened.text.count("Wrong: it is") == count
        assert f"Why {guess} and not {true}" in opened.text

        driver.get((tmp_path / "run" / "report.html").as_uri())  # the same from the run's own report
        click_cell(driver, true, guess)
        assert driver.current_url.startswith((tmp_path / "run" / "confusions.html").as_uri())
        (opened,) = shown_cells(driver)
        assert opened.text.count("Wrong: it is") == count
        assert opened.find_elements("css selector", "svg image, svg use"), "with pictures"
        right = next(name for name in evaluation["balanced"]["classes"] if name["sensitivity"]["value"] > 0)["name"]
        driver.find_element("link text", "Report").click()
        click_cell(driver, right, right)
        assert f"{right}: " in shown_cells(driver)[0].text


def click_cell(driver: Any, true: str, guess: str) -> None:
    title = f"//*[name()='title'][contains(., 'of {true} (')][contains(., 'for {guess}')]"
    driver.find_element("xpath", f"{title}/../..").click()


def shown_cells(driver: Any) -> list[Any]:
    return [part for part in driver.find_elements("class name", "cell") if part.is_displayed()]


def test_a_run_that_is_measured_on_validation_images_has_their_cells(tmp_path: Path) -> None:
    make_tiny_run(tmp_path, QUICK)
    page = tmp_path / "run" / "confusions.html"
    assert "9 test images" in page.read_text()
    likethat("evaluate", tmp_path / "run", "--interpretability", "--part", "val", "--device", "cpu")
    assert "9 validation images" in page.read_text()
    assert json.loads(likethat("verify", tmp_path / "run", "--json", "--device", "cpu").stdout)["passed"]
