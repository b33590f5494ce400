"""Errors that users see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sinkscope.errors import SinkscopeError


@contextmanager
def refused(match: str | None = None, words: tuple[str, ...] | list[str] = ()) -> Iterator[pytest.ExceptionInfo]:
    """What is done inside has to end in an error that matches, and that has all the words."""
    with pytest.raises(SinkscopeError, match=match) as caught:
        yield caught
    assert all(word in str(caught.value) for word in words), str(caught.value)
