"""Progress of long work, as functions report it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as `progress(what, done, total)`."""


def silent(what: str, done: int, total: int) -> None:
    """Show nothing; the progress of a measurement that nobody watches."""
