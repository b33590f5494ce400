"""A GGUF file parsed once: transformers does so for the configuration, the tokenizer and the weights each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

_LOCK = threading.RLock()


@contextmanager
def parsed_once() -> Iterator[None]:
    """Context manager in which each GGUF file is parsed once, which takes seconds for a large vocabulary.

    Other threads wait for it to end, or the last of them would leave another one's parser in the library.
    """
    try:
        import gguf
    except ImportError:  # what needs it says so
        yield
        return
    with _LOCK:
        reader = gguf.GGUFReader
        gguf.GGUFReader = cache(_plain_reader(reader))
        try:
            yield
        finally:
            gguf.GGUFReader = reader


def _plain_reader(reader: Any) -> Any:
    """A class of readers that slice a plain array: a slice of a memory map takes four times as long."""

    class PlainReader(reader):
        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._data = mapped.view(np.ndarray)

    return PlainReader
