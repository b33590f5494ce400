"""Headless Chromium over its own protocol, one page at a time."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Coroutine
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
EVENTS = ("Network.requestWillBeSent", "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


def found() -> str | None:
    """The path of a browser, None where there is none, or nothing that steers it."""
    if find_spec("choreographer") is None:
        return None
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. `errors` gathers what the console said of warnings and errors, and exceptions; `asked` addresses."""

    def __init__(self, seconds: float = 120.0):
        self.errors = []
        self.asked = []
        self._until = time.monotonic() + seconds
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Browser:
        self._wait_for(self._start())
        return self

    async def _start(self):
        import choreographer

        self._browser = choreographer.Browser(found(), headless=True, enable_sandbox=False, enable_gpu=False)
        await self._browser.open()
        self._tab = await self._browser.create_tab("about:blank")
        for event in EVENTS:
            self._tab.subscribe(event, self._note)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._tab.send_command(f"{domain}.enable")

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None):
        self._loop.run_until_complete(self._browser.close())
        self._loop.close()

    def _wait_for(self, work: Coroutine[Any, Any, Any]):
        return self._loop.run_until_complete(asyncio.wait_for(work, self._until - time.monotonic()))

    def send(self, method: str, **params):
        answer = self._wait_for(self._tab.send_command(method, params))
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def open(self, page: Path | str, width: int = 1400, *, dark: bool = False, phone: bool = False):
        """Load a file or an address in a window of this width, and wait until it is loaded."""
        scale = 2 if phone else 1
        size = {"width": width, "height": 900, "mobile": phone, "deviceScaleFactor": scale}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self._wait_for(self._load(page if isinstance(page, str) else page.resolve().as_uri()))

    async def _load(self, *urls: str):
        for url in urls:
            loaded = self._tab.subscribe_once("Page.loadEventFired")
            await self._tab.send_command("Page.navigate", {"url": url})
            await loaded

    def reopen(self):
        """Open the address that the page has now, as a link."""
        self._wait_for(self._load("about:blank", self.run("location.href")))

    def click(self, selector: str):
        """Click on what a selector finds, and let the page draw."""
        self.run(f"document.querySelector({json.dumps(selector)}).click()")
        self.run("new Promise((done) => setTimeout(done, 100))")

    def texts(self, selector: str) -> list[str]:
        """The texts of all that a selector finds."""
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)")

    def text(self, selector: str) -> str:
        """The text of the one that a selector finds."""
        (text,) = self.texts(selector)
        return text

    def wait(self, condition: str):
        """Wait until an expression is true."""
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < self._until, condition
            time.sleep(0.02)

    def press(self, key: str):
        """Press a key."""
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key)

    def run(self, script: str):
        """The value of an expression, awaited."""
        done = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def _note(self, message: dict[str, Any]):
        method, params = message["method"], message["params"]
        if method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", {}).get("description", params)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(params["entry"]))
