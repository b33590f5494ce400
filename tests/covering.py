"""Which cases of a full product run by default; the others are slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every_nth(values: Iterable[Any], n: int, first: int = 0) -> list[Any]:
    """Parameters of which each `n`-th runs by default: tests that begin at different ones share the families."""
    params = []
    for number, value in enumerate(values):
        marks = () if number % n == first else pytest.mark.slow
        params.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks))
    return params
