"""Compiled code runs uncompiled while hooks are on a model: it would skip those that came after its compilation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


class _Stance:
    """How many ask for uncompiled code, and the stance of the compiler that they share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._forced: AbstractContextManager[None] | None = None

    def ask(self) -> None:
        """One more asks."""
        with self._lock:
            if self._forced is None:
                self._forced = torch.compiler.set_stance("force_eager")
                self._forced.__enter__()
            self._count += 1

    def release(self) -> None:
        """One less asks; the last one gives the compiler its former stance back."""
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._forced is not None:
                self._forced.__exit__(None, None, None)
                self._forced = None


_STANCE = _Stance()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Context manager in which everything that `torch.compile` made, in the whole process, runs uncompiled."""
    _STANCE.ask()
    try:
        yield
    finally:
        _STANCE.release()
