"""The page of a run whose cells see windows: it says what a box is, and has no slider for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.browser import chromium
from helpers.explain_run import make_run
from helpers.page import Page
from helpers.serving import serving

from likethat.explaining.boxes import SEEN_ALONE
from likethat.runs.classifier import load


@pytest.mark.parametrize("options", [{}, {"windows": "48,16"}], ids=["cells", "windows"])
def test_what_a_box_is(tmp_path: Path, options: dict[str, str]) -> None:
    run = make_run(tmp_path, **options)
    with serving(load(run.path, "cpu")) as client, chromium() as driver:
        page = Page(driver, client)
        page.open("/", ".zone")
        page.upload(run.root / run.samples[0].path)
        page.all(".evidence-row")
        assert (SEEN_ALONE in page.text(".viewer")) == bool(options)
        assert bool(driver.find_elements("id", "percentile")) == (not options)
        assert "null" not in page.text(".viewer")
        if options:
            assert sorted(page.box(0)[2:]) == pytest.approx([48 / 160, 48 / 96])
            page.all(".segments label")[2].click()
            assert len(page.all(".cells i")) == 56 * 56
