"""Progress of long work, as functions report it, in lines too, and the processes of torchrun that share the work."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[str, int, int], None]
"""Called as `progress(what, done, total)`."""


def silent(work: str, done: int, total: int) -> None:
    """Show nothing; the progress of a measurement that nobody watches."""


_WATCHING: ContextVar[Progress] = ContextVar("progress", default=silent)


@contextmanager
def watched_by(progress: Progress) -> Iterator[None]:
    """Context manager in which `report_progress` calls a progress: passes inside a measurement then show, too."""
    token = _WATCHING.set(progress)
    try:
        yield
    finally:
        _WATCHING.reset(token)


def report_progress(work: str, done: int, total: int) -> None:
    """Tell whoever watches how much of the passes of a step is done."""
    _WATCHING.get()(work, done, total)


PAUSE = 30.0
"""Seconds between two lines of progress."""


class ProgressLines:
    """Says every half minute how far work is, for those who read no bar: a file, a log, a pipe.

    A thread of its own says it, because a stage may report nothing for minutes. It ends with `end`, or the process.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Begin with the first stage that is shown.

        Args:
            say: Prints a line.
        """
        self._say = say
        self._stage = "", 0, 0
        self._first = 0
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, stage: str, done: int, total: int) -> None:
        """Note how much of a stage is done; of a `total` of 0 only the time is known."""
        if (stage, total) != (self._stage[0], self._stage[2]):
            self._started = time.monotonic()
            self._first = done
        self._stage = stage, done, total
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def line(self) -> str:
        """Return what is said now: the stage, how much of it is done, the time it took, and about how much is left."""
        stage, done, total = self._stage
        seconds = time.monotonic() - self._started
        times = f"{clock(seconds)} so far"
        if not total:
            return f"{stage} ({times})"
        if done > self._first:
            times += f", about {clock(seconds * (total - done) / (done - self._first))} left"
        return f"{stage}: {done} of {total} ({times})"

    def end(self) -> None:
        """Say nothing more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(PAUSE):
            self._say(self.line())


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds, such as "2:05"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def world_size() -> int:
    """Return the number of processes that torchrun started together; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Return whether this is the process that prints and writes."""
    return os.environ.get("RANK", "0") == "0"
