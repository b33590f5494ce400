"""Headless Chromium over its own protocol: nothing to install but the browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--mute-audio",
    "--disable-extensions",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)
# A browser reads file 3 and writes file 4.
_AS_3_AND_4 = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def found() -> str | None:
    """The path of a browser, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. `errors` gathers what the console said of warnings and errors, and exceptions; `asked` addresses."""

    def __init__(self, seconds: float = 120.0):
        self.errors = []
        self.asked = []
        self._until = time.monotonic() + seconds
        self._number = 0
        self._buffer = b""
        self._loaded = False

    def __enter__(self) -> Browser:
        program = found()
        assert program is not None
        self._folder = tempfile.TemporaryDirectory(prefix="sinkscope-browser-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        words = [program, *_OPTIONS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _AS_3_AND_4, str(theirs_in), str(theirs_out), *words],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._folder.name},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        os.set_blocking(self._in, False)
        page = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None):
        os.close(self._out)  # a closed pipe ends it
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        self._folder.cleanup()

    def send(self, method: str, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if hasattr(self, "_session"):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def open(self, path: Path, width: int, height: int = 900, *, dark: bool = False, phone: bool = False):
        """Load a file in a window of this size, and wait until it is loaded."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            mobile=phone,
            deviceScaleFactor=2 if phone else 1,
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.send("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._receive()

    def reopen(self):
        """Open the address that the page has now, as a link."""
        address = self.run("location.href")
        for url in ("about:blank", address):
            self._loaded = False
            self.send("Page.navigate", url=url)
            while not self._loaded:
                self._receive()

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

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert time.monotonic() < self._until, "the browser does not answer"
            assert self._process.poll() is None, "the browser has ended"
            try:
                self._buffer += os.read(self._in, 1 << 20)
            except BlockingIOError:
                time.sleep(0.005)
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]):
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", {}).get("description", params)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(params["entry"]))
