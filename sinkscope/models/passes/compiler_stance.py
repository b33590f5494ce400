"""Compiled code runs uncompiled while hooks are on a model: it would skip those that came after its compilation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

_LOCK = threading.Lock()
_FORCED: list[AbstractContextManager[None]] = []  # a stance of the compiler for each that asks; all threads share it


@contextmanager
def without_compiler() -> Iterator[None]:
    """Context manager in which everything that `torch.compile` made, in the whole process, runs uncompiled."""
    with _LOCK:
        _FORCED.append(torch.compiler.set_stance("force_eager"))
        _FORCED[-1].__enter__()
    try:
        yield
    finally:
        with _LOCK:
            _FORCED.pop().__exit__(None, None, None)  # the first one's, which sets back what was before, comes last
