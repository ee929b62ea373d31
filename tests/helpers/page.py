"""The served page in a real browser, for tests that do what a person does."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from helpers.browser import PATIENCE


class Page:
    """The page of one server in the browser. Elements are named by CSS selectors."""

    def __init__(self, driver: Any, client: httpx.Client) -> None:
        self.driver, self.base = driver, str(client.base_url)

    def open(self, path: str, wait: str) -> None:
        """Open a page; the pointer waits in a corner, so that no line is lit because it happens to lie under it."""
        from selenium.webdriver.common.actions.action_builder import ActionBuilder

        self.driver.get(self.base + path)
        corner = ActionBuilder(self.driver)
        corner.pointer_action.move_to_location(0, 0)
        corner.perform()
        self.all(wait)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.until(lambda: self.driver.find_elements("css selector", selector), selector)
        return found

    def one(self, selector: str) -> Any:
        return self.all(selector)[0]

    def text(self, selector: str) -> str:
        script = "return document.querySelector(arguments[0])?.innerText.toWellFormed()"  # the driver takes no other
        return str(self.until(lambda: self.driver.execute_script(script, selector), selector))

    def click(self, selector: str) -> None:
        self.until(lambda: [self.one(selector).click()], selector)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for the condition. An element that the page has just replaced or covered is looked for again."""
        from selenium.common.exceptions import (
            ElementClickInterceptedException,
            ElementNotInteractableException,
            StaleElementReferenceException,
        )

        passing = ElementClickInterceptedException, ElementNotInteractableException, StaleElementReferenceException
        end = time.monotonic() + PATIENCE
        while True:
            with suppress(*passing):
                if value := condition():
                    return value
            assert time.monotonic() < end, f"{what} did not come; {self.driver.get_log('browser')}"
            time.sleep(0.02)

    def upload(self, *paths: Path) -> None:
        self.one("#choose").send_keys("\n".join(map(str, paths)))

    def box(self, stage: int) -> list[float]:
        """Return the lit box on the picture (0) or on the training picture (1)."""
        script = "return [...document.querySelectorAll('.two-up .stage')[arguments[0]].querySelectorAll('.box-light')]"
        script += ".map(b => ['x', 'y', 'width', 'height'].map(n => Number(b.getAttribute(n))))[0]"
        value: list[float] = self.driver.execute_script(script, stage)
        return value

    def rows(self) -> list[Any]:
        """Return the lines of the evidence from top to bottom, one for each prototype. All groups are opened."""
        script = "document.querySelectorAll('.row-members').forEach(group => { group.open = true })"
        self.all(".evidence-row")
        self.driver.execute_script(script)
        rows = {row.get_attribute("data-prototype"): row for row in reversed(self.all(".evidence-row"))}
        return list(reversed(rows.values()))

    def drag(self, selector: str, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Draw a rectangle on an element; the corners are shares of it."""
        from selenium.webdriver.common.action_chains import ActionChains

        element = self.one(selector)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        width, height = element.size["width"], element.size["height"]
        corners = [(round((x - 0.5) * width), round((y - 0.5) * height)) for x, y in (start, end)]
        chain = ActionChains(self.driver).move_to_element_with_offset(element, *corners[0]).click_and_hold()
        for step in (0.5, 1.0):
            x, y = (round(a + step * (b - a)) for a, b in zip(*corners, strict=True))
            chain = chain.move_to_element_with_offset(element, x, y)
        chain.release().perform()

    def point_at(self, element: Any) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).move_to_element(element).perform()

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def focused(self) -> str:
        script = "const e = document.activeElement; return e.dataset.prototype ?? e.id ?? e.textContent"
        return str(self.driver.execute_script(script))
