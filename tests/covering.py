"""Which cases of a full product run by default; the others are slow."""

from __future__ import annotations

from itertools import product

import pytest


def slow(*values):
    """The values of a case that does not run by default."""
    return pytest.param(*values, marks=pytest.mark.slow)


def each_other(rows, columns, n):
    """Pairs of the two, of which those of every `n`-th diagonal are quick; the rest is slow."""
    pairs = product(enumerate(rows), enumerate(columns))
    return [(row, column) if (i + j) % n == 0 else slow(row, column) for (i, row), (j, column) in pairs]


def every_nth(values, n, first=0):
    """Parameters of which each `n`-th runs by default: tests that begin at different ones share the families."""
    return [value if number % n == first else slow(value) for number, value in enumerate(values)]
