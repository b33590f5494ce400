"""Progress of long work, as functions report it, and the processes of torchrun that share the work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[str, int, int], None]
"""Called as `progress(what, done, total)`."""


def silent(what: str, done: int, total: int) -> None:
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


def report_progress(what: str, done: int, total: int) -> None:
    """Tell whoever watches how much of the passes of a step is done."""
    _WATCHING.get()(what, done, total)


def world_size() -> int:
    """Return the number of processes that torchrun started together; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Return whether this is the process that prints and writes."""
    return os.environ.get("RANK", "0") == "0"
