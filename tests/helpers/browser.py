"""A real Chromium for tests of pages. They are skipped, with the reason, where there is none."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

OPTIONS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,900""".split()
PATIENCE = 120  # seconds for what a page does; a busy machine takes its time
STARTS = 3  # attempts: the port that was free for the driver may be taken when it gets there


@contextmanager
def chromium() -> Iterator[Any]:
    """Provide a selenium driver with a profile of its own."""
    selenium = pytest.importorskip("selenium.webdriver")
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.chrome.service import Service

    browser, driver_file = shutil.which("chromium"), shutil.which("chromedriver")
    if not (browser and driver_file):
        pytest.skip("chromium and chromedriver are not installed (`make browser` tries to)")
    options = selenium.ChromeOptions()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for option in (*OPTIONS, f"--user-data-dir={profile}"):
            options.add_argument(option)
        for left in reversed(range(STARTS)):
            try:
                driver = selenium.Chrome(options=options, service=Service(driver_file))
                break
            except WebDriverException:
                if not left:
                    raise
        driver.set_script_timeout(PATIENCE)
        try:
            yield driver
        finally:
            driver.quit()
