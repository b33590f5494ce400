"""The sampling error of a number that was measured on several texts, tokens or sequences."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

RESAMPLES = 400
FEWEST_VALUES = 3  # fewer values give no margin


def margin_of(values: Float[np.ndarray, " sample"]) -> float | None:
    """Return two standard errors of the mean over samples, by bootstrap; more for few samples.

    The standard deviation over draws is widened by the square root of n / (n - 1), as that of n samples is. Of four
    samples, 3.2 standard errors are as sure as two are of many.

    Args:
        values: One value per sample; NaN is left out.

    Returns:
        None for fewer than three values: a difference is then not judged.
    """
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    count = len(finite)
    if count < FEWEST_VALUES:
        return None
    picks = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    spread = float(np.std(finite[picks].mean(1)))
    fewer = 1 / (count - 1)
    errors = 1.96 + 2.37 * fewer + 2.82 * fewer**2 + 2.56 * fewer**3  # Student's t, 95 %, within 3 %
    return errors * spread * (count / (count - 1)) ** 0.5
