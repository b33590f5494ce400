"""What the commands print: results on stdout, progress and notes on stderr."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from html import escape
from shutil import get_terminal_size
from textwrap import fill
from typing import Any, ClassVar

from sinkscope.files.plain import visible

WIDTH = 80
"""Characters of a line where there is no terminal."""

BETWEEN = 0.5
"""Seconds between what a notebook shows of progress."""

ERASE = "\r\x1b[K"
"""Makes a terminal erase the line."""


class ProgressBar:
    """A bar with the time elapsed and left on standard error; it shows nothing where standard error is not a terminal.

    It is called with what is being done, how much of it is done, and how much there is. It appears with the first call
    and must end before anything but a note is printed, because it is painted over what stands in its line.
    Bars of other libraries, such as a download's, take turns with it.
    """

    shown: ClassVar[bool] = False
    """Whether one stands on the screen."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._live = sys.stderr.isatty() and os.environ.get("TERM") not in (None, "dumb")

    def __enter__(self) -> ProgressBar:
        return self

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show how much of a stage is done; of a `total` of 0 only the time is shown."""
        if self._live:
            if self._bar is None:
                self._make(stage)
            count = f"{done}/{total}" if total else ""
            bar: Any = self._bar
            bar.update(self._task, description=visible(stage), completed=done, total=total or None, count=count)

    def _make(self, stage: str) -> None:
        from rich import progress as rich
        from rich.console import Console

        self._bar = rich.Progress(
            rich.TextColumn("{task.description}", markup=False),
            rich.BarColumn(),
            rich.TextColumn("{task.fields[count]}", markup=False),
            rich.TimeElapsedColumn(),
            rich.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            refresh_per_second=2,
        )
        ProgressBar.shown = True
        self._task = self._bar.add_task(visible(stage), total=None, count="")
        self._bar.start()

    def end(self) -> None:
        """Take the bar off the screen; it does not come back."""
        if self._live and self._bar is not None:
            self._bar.stop()
            ProgressBar.shown = False
        self._live = False

    def __exit__(self, *_: object) -> None:
        self.end()


class NotebookBar:
    """What a measurement does, in the output of a notebook's cell; outside of notebooks it shows nothing.

    It is called like `ProgressBar`, appears with the first call, and is empty at the end.
    """

    def __init__(self) -> None:
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        self._live = type(shell).__name__ == "ZMQInteractiveShell"
        self._handle: Any = None
        self._shown = 0.0

    def __enter__(self) -> NotebookBar:
        return self

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show how much of a stage is done, at most twice a second; of a `total` of 0 only the stage is shown."""
        if self._live and time.monotonic() - self._shown >= BETWEEN:
            count = f" {done}/{total} <progress value='{done}' max='{total}'></progress>" if total else ""
            self._show(f"<small>{escape(visible(stage))}{count}</small>")
            self._shown = time.monotonic()

    def _show(self, html: str) -> None:
        from IPython.display import HTML, display  # there is one, else nothing is live

        if self._handle is None:
            self._handle = display(HTML(html), display_id=True, metadata={"sinkscope": "progress"})
        else:
            self._handle.update(HTML(html), metadata={"sinkscope": "progress"})

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._show("")


def end_bar(progress: Any) -> None:
    """End a progress bar before anything is printed; other progress has nothing on the screen."""
    if isinstance(progress, ProgressBar):
        progress.end()


def terminal_width() -> int:
    """Return the number of characters in a line of the terminal; 80 where there is none."""
    return get_terminal_size((WIDTH, 24)).columns


def wrapped(text: str, stream: Any) -> str:
    """Return text whose long lines are broken between words if a terminal shows it; other readers get whole lines."""
    if not stream.isatty():
        return text
    width = terminal_width()
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) > width:
            line = fill(line, width, break_on_hyphens=False, break_long_words=False)  # a path stays whole
        lines.append(line)
    return "\n".join(lines)


def note(message: str) -> None:
    """Print a line for the reader, not for the next program; it is lost if standard error cannot be written."""
    try:
        erased = ERASE if ProgressBar.shown else ""
        print(erased + wrapped(visible(message), sys.stderr), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        drop(sys.stderr)


def show(text: str) -> None:
    """Print text on standard output; on a terminal its long lines are broken between words."""
    print(wrapped(visible(text), sys.stdout))


def drop(stream: Any) -> None:
    """Give up a stream that cannot be written: what is still in its buffer would fail again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
