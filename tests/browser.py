"""Headless Chromium, one page at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def found() -> str | None:
    """The path of a browser, None where there is none, or nothing that steers it."""
    if find_spec("playwright") is None:
        return None
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser for the length of a `with`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as steering:
        running = steering.chromium.launch(executable_path=found(), args=["--no-sandbox"])
        yield Browser(running.new_page())
        running.close()


class Browser:
    """One page. `errors` gathers what the console said of warnings and errors, and exceptions; `asked` addresses."""

    def __init__(self, page: Any):
        self.errors = []
        self.asked = []
        self.page = page
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._note)

    def _note(self, message: Any):
        if message.type in ("error", "warning", "assert"):
            self.errors.append(message.text)

    def open(self, page: Path | str, width: int = 1400):
        """Load a file or an address in a window of this width, and wait until it is loaded."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.goto(page if isinstance(page, str) else page.resolve().as_uri())

    def reopen(self):
        """Open the address that the page has now, as a link."""
        address = self.page.url
        self.page.goto("about:blank")
        self.page.goto(address)

    def click(self, selector: str):
        """Click on what a selector finds, and let the page draw."""
        self.run(f"document.querySelector({json.dumps(selector)}).click()")
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    def texts(self, selector: str) -> list[str]:
        """The texts of all that a selector finds."""
        return self.page.locator(selector).all_text_contents()

    def text(self, selector: str) -> str:
        """The text of the one that a selector finds."""
        (text,) = self.texts(selector)
        return text

    def wait(self, condition: str):
        """Wait until an expression is true."""
        self.page.wait_for_function(f"() => {condition}", polling=20)

    def run(self, script: str):
        """The value of an expression, awaited."""
        return self.page.evaluate(script)
