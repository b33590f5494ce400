"""Progress of long work, as functions report it."""

from __future__ import annotations

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
