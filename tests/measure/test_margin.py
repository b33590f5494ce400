"""Intervals of means, against simulated samples whose mean is known."""

from __future__ import annotations

import numpy as np
import pytest

from sinkscope.measure.margin import DIFFERENCES, SCORES, interval_of, margin_of

DRAWS = 700
ENOUGH = 0.93  # of 0.95, with the noise of the draws
COUNTS = (3, 4, 6, 12, 24)


@pytest.mark.parametrize(("count", "errors"), [(3, 4.303), (4, 3.182), (12, 2.201), (60, 2.001)])
def test_the_margin_of_a_mean_is_as_many_standard_errors_as_student_s_t_says(count, errors):
    values = np.random.default_rng(count).normal(3.0, 2.0, count)
    assert margin_of(values) == pytest.approx(errors * values.std(ddof=1) / np.sqrt(count), rel=1e-3)
    assert margin_of(np.append(values, np.nan)) == margin_of(values)


def test_too_few_values_have_no_margin_and_equal_ones_none_at_all():
    assert margin_of(np.array([1.0, 2.0])) is None and margin_of(np.array([1.0, 2.0, np.nan])) is None
    assert margin_of(np.ones(5)) == 0.0


def test_equal_scores_have_a_margin():
    sure = interval_of(np.ones(10), SCORES)
    assert sure is not None and (sure.mean, sure.high) == (1.0, 1.0) and 0.6 < sure.low < 0.8
    assert sure.margin == margin_of(np.ones(10), SCORES) == 1.0 - sure.low


def coverage(draw, mean, bounds, seed) -> float:
    """How often the interval of a sample holds the mean."""
    rng = np.random.default_rng(seed)
    held = 0
    for _ in range(DRAWS):
        interval = interval_of(draw(rng), bounds)
        held += interval.low <= mean <= interval.high
    return held / DRAWS


@pytest.mark.parametrize("count", COUNTS)
def test_intervals_of_measured_numbers_hold_the_mean(count):
    assert coverage(lambda rng: rng.normal(3.0, 2.0, count), 3.0, None, count) >= ENOUGH


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("share", [0.01, 0.05, 0.2, 0.5, 0.9])
def test_intervals_of_shares_hold_the_share(count, share):
    assert coverage(lambda rng: (rng.random(count) < share).astype(float), share, SCORES, count) >= ENOUGH


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("better", "worse"), [(0.02, 0.0), (0.1, 0.1), (0.3, 0.0), (0.5, 0.3), (0.9, 0.05)])
def test_intervals_of_differences_between_paired_answers_hold_the_difference(count, better, worse):
    def draw(rng):
        where = rng.random(count)
        return (where < better) - 1.0 * ((where >= better) & (where < better + worse))

    assert coverage(draw, better - worse, DIFFERENCES, count) >= ENOUGH
