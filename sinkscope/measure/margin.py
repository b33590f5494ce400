"""How far the mean of several texts, prompts or sequences may be from the mean of all texts of their kind.

1. The mean over n values has the standard error s / sqrt(n), s with n - 1 in its divisor.
2. Its 95 % interval is as many standard errors wide as Student's t with n - 1 degrees of freedom says: 4.3 on either
   side for 3 values, 2.2 for 12, 2.0 for 60.
3. A number that is no mean, such as a count of heads by their mean attention, has the interval of that very number
   under a bootstrap over texts: half of it is the margin.
4. Values with bounds, such as scores from 0 to 1, get two more first, at either bound: ten right answers of ten say
   that a wrong answer is rare, not that there is none (Agresti and Coull 1998; for differences between paired scores,
   which lie between -1 and 1, Bonett and Price 2012).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from sinkscope.results.mean import Mean, MeanKind

RESAMPLED = 1000  # bootstrap samples of a margin
FEWEST_VALUES = 3  # fewer values give no margin
SURE = 0.95  # how often an interval holds the mean of all texts
SCORES = (0.0, 1.0)
DIFFERENCES = (-1.0, 1.0)
"""Bounds of a score, and of the difference between two scores of one prompt."""


@dataclass(frozen=True)
class Interval:
    """The mean of some values, and the interval that holds the mean of their kind in 95 of 100 samples."""

    mean: float
    low: float
    high: float

    @property
    def margin(self) -> float:
        """The distance from the mean to the farther end."""
        return max(self.high - self.mean, self.mean - self.low)


def interval_of(values: Float[np.ndarray, " sample"], bounds: tuple[float, float] | None = None) -> Interval | None:
    """Return the 95 % interval of the mean over samples.

    Args:
        values: One value per independent sample: of answers to one prompt, and of texts under two methods, the mean or
            the difference. NaN is left out.
        bounds: Between which values lie; None: they have none.

    Returns:
        None for fewer than three values: a difference is then not judged.
    """
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    if len(finite) < FEWEST_VALUES:
        return None
    least, most = bounds or (-inf, inf)
    with_bounds = np.append(finite, bounds or ())
    centre = float(with_bounds.mean())
    half = float(stdtrit(len(with_bounds) - 1, (1 + SURE) / 2) * with_bounds.std(ddof=1)) / sqrt(len(with_bounds))
    return Interval(float(finite.mean()), max(centre - half, least), min(centre + half, most))


def margin_of(values: Float[np.ndarray, " sample"], bounds: tuple[float, float] | None = None) -> float | None:
    """Return half of that interval, or of values with bounds its longer part."""
    interval = interval_of(values, bounds)
    return None if interval is None else interval.margin


def mean_of(values: Float[Any, " sample"], kind: MeanKind = "number") -> Mean | None:
    """Return the mean over texts with its margin and the value of each text; None if nothing was read.

    Args:
        values: One value per text; NaN was not read.
        kind: What it is.
    """
    samples = np.asarray(values, dtype=float)
    if not np.isfinite(samples).any():
        return None
    return Mean(float(np.nanmean(samples)), margin_of(samples), tuple(samples.tolist()), kind)


def count_above(values: Float[Any, "*thing text"], bound: float) -> Mean:
    """Return how many things have a mean over texts above a bound, with the margin of this count.

    It is half of the 95 % interval under a bootstrap over texts (percentiles; Efron and Tibshirani 1993).
    """
    texts = values.shape[-1]
    values = np.asarray(values, dtype=float).reshape(-1, texts)
    margin = None
    if len(values) and texts >= FEWEST_VALUES:
        drawn = np.random.default_rng(0).integers(texts, size=(RESAMPLED, texts))
        times = (drawn[:, :, None] == np.arange(texts)).sum(1)  # how often each text was drawn
        counts = (values @ times.T > bound * texts).sum(0)
        low, high = np.quantile(counts, [(1 - SURE) / 2, (1 + SURE) / 2]).tolist()
        margin = (high - low) / 2
    by_text = (values > bound).sum(0).astype(float)
    return Mean(float((values.mean(1) > bound).sum()), margin, tuple(by_text.tolist()), "count")
