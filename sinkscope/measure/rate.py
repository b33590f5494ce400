"""Shares with their confidence interval."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Rate:
    """A share of sequences with its 95 % confidence interval (Wilson)."""

    share: float
    low: float
    high: float


def wilson(successes: int | float, trials: int) -> Rate:
    """Return Wilson's score interval of a share, which holds the true share 95 times of 100.

    Of the mean of scores between 0 and 1 it is too wide if anything: their variance is at most share * (1 - share).
    """
    z = 1.959964
    share = successes / trials
    shrink = 1 + z * z / trials
    middle = (share + z * z / (2 * trials)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return Rate(share, max(0.0, middle - half), min(1.0, middle + half))


def known_numbers(values: Iterable[float | int | None]) -> list[float]:
    """Return those that are numbers: neither None nor NaN."""
    return [value for value in values if value is not None and not math.isnan(value)]


def mean_known(values: Iterable[float | int | None]) -> float | None:
    """Return the mean of those that are numbers. None: there are none."""
    numbers = known_numbers(values)
    if not numbers:
        return None
    return fmean(numbers)
