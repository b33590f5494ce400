"""Which cases of a full product run by default; the others are slow."""

from __future__ import annotations

import pytest


def slow(*values):
    """The values of a case that does not run by default."""
    return pytest.param(*values, marks=pytest.mark.slow)


def covering(cases, quick):
    """All cases, of which those of `quick` run by default."""
    return [case if case in quick else slow(*case) for case in cases]


def each_other(rows, columns, n=2, always=()):
    """Pairs of the two, of which those of every `n`-th diagonal are quick, and those of `always`; the rest is slow."""
    pairs = []
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            quick = (i + j) % n == 0 or row in always or column in always
            pairs.append((row, column) if quick else slow(row, column))
    return pairs


def every_nth(values, n, first=0):
    """Parameters of which each `n`-th runs by default: tests that begin at different ones share the families."""
    params = []
    for number, value in enumerate(values):
        case = value if isinstance(value, tuple) else (value,)
        params.append(pytest.param(*case) if number % n == first else slow(*case))
    return params
