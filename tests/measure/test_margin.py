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


def numbers(rng, count):
    return rng.normal(3.0, 2.0, count)


def scores(share):
    return lambda rng, count: (rng.random(count) < share).astype(float)


def differences(better, worse):
    def draw(rng, count):
        where = rng.random(count)
        return 1.0 * (where < better) - 1.0 * (where > 1 - worse)

    return draw


DRAWN = [(numbers, 3.0, None)]
DRAWN += [(scores(share), share, SCORES) for share in (0.01, 0.05, 0.2, 0.5, 0.9)]
for more, less in ((0.02, 0.0), (0.1, 0.1), (0.5, 0.3), (0.9, 0.05)):
    DRAWN.append((differences(more, less), more - less, DIFFERENCES))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("draw", "mean", "bounds"), DRAWN)
def test_intervals_hold_the_mean(draw, mean, bounds, count):
    rng, held = np.random.default_rng(count), 0
    for _ in range(DRAWS):
        interval = interval_of(draw(rng, count), bounds)
        held += interval.low <= mean <= interval.high
    assert held >= ENOUGH * DRAWS
