"""What the commands print: results on stdout, progress and notes on stderr."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from sinkscope.files.plain import visible
from sinkscope.files.progress import ProgressLines

WIDTH = 80
"""Characters of a line where there is no terminal."""
COUNTED = "{desc} {bar} {n_fmt}/{total_fmt} {elapsed}<{remaining}"
WAITED = "{desc} {elapsed}"
"""What a bar shows of a stage, and of one without an end that is known."""


class ProgressBar:
    """A bar with the time so far and left, where a terminal or a notebook shows it; elsewhere a line every half minute.

    It is called with what is being done, how much of it is done, and how much there is. It appears with the first call
    and must end before anything but a note is printed, because it is painted over what stands in its line.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._stage: tuple[str, int] | None = ("", 0)
        self._lines: ProgressLines | None = None

    def __enter__(self) -> ProgressBar:
        return self

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show how much of a stage is done; of a `total` of 0, and of a stage that is done, only the time is shown."""
        if self._stage is None:
            return
        if total and done >= total:  # a full bar would stand there until the next stage reports
            stage, done, total = f"{stage}: done, going on", 0, 0
        if self._bar is None or self._stage != (stage, total):
            from tqdm.auto import tqdm

            if self._bar is not None:
                self._bar.close()
            self._stage = stage, total
            options: Any = {"bar_format": COUNTED if total else WAITED, "leave": False, "dynamic_ncols": True}
            options |= {"desc": visible(stage), "total": total or None, "initial": done}
            self._bar = tqdm(**options, mininterval=0.5, file=sys.stderr, disable=None)  # None: on a terminal alone
        self._bar.update(done - self._bar.n)
        if self._bar.disable:
            if self._lines is None:
                self._lines = ProgressLines(note)
            self._lines.show(stage, done, total)

    def end(self) -> None:
        """Take the bar off the screen, and say nothing more; it does not come back."""
        if self._bar is not None:
            self._bar.close()
        if self._lines is not None:
            self._lines.end()
        self._bar = self._stage = None

    def __exit__(self, *_: object) -> None:
        self.end()


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
    lines = [fill(line, width, break_on_hyphens=False, break_long_words=False) for line in text.split("\n")]
    return "\n".join(lines)  # a path stays whole


def note(message: str) -> None:
    """Print a line for the reader, not for the next program; it is lost if standard error cannot be written."""
    from tqdm import tqdm  # which takes a bar off the screen meanwhile

    with suppress(OSError, ValueError):
        with tqdm.external_write_mode(sys.stderr):
            start = "\r\x1b[K" if sys.stderr.isatty() else ""  # erases the line of the bar
            print(start + wrapped(visible(message), sys.stderr), file=sys.stderr, flush=True)
        return
    drop(sys.stderr)


def show(text: str) -> None:
    """Print text on standard output; on a terminal its long lines are broken between words."""
    print(wrapped(visible(text), sys.stdout))


def drop(stream: Any) -> None:
    """Give up a stream that cannot be written: what is still in its buffer would fail again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
