"""Intervals of means and counts, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from sinkscope.measure.margin import DIFFERENCES, SCORES, count_above, interval_of, margin_of


@pytest.mark.parametrize(("count", "errors"), [(3, 4.303), (12, 2.201), (60, 2.001)])
def test_the_margin_of_a_mean_is_as_many_standard_errors_as_student_s_t_says(count, errors):
    values = np.random.default_rng(count).normal(3.0, 2.0, count)
    assert margin_of(values) == pytest.approx(errors * values.std(ddof=1) / np.sqrt(count), rel=1e-3)
    assert margin_of(np.append(values, np.nan)) == margin_of(values)


def test_too_few_values_have_no_margin_and_equal_ones_none_at_all_but_for_scores():
    assert margin_of(np.array([1.0, 2.0, np.nan])) is None and margin_of(np.ones(5)) == 0.0
    sure, same = interval_of(np.ones(10), SCORES), interval_of(np.zeros(10), DIFFERENCES)
    assert sure.high == 1.0 == sure.low + margin_of(np.ones(10), SCORES) and 0.6 < sure.low < 0.8
    assert -same.low == same.high == pytest.approx(2.201 * np.sqrt(2 / 11 / 12), rel=1e-3)


def test_the_margin_of_a_count_is_that_of_texts_that_are_drawn_again():
    values = np.array([[0.9, 0.0] * 4, [0.5] * 8, [0.5, 0.2] * 4])
    drawn = np.random.default_rng(0).integers(8, size=(1000, 8))
    low, high = np.quantile([(values[:, texts].mean(1) > 0.34).sum() for texts in drawn], [0.025, 0.975])
    found = count_above(values, 0.34)
    assert (found.value, found.margin, found.by_text[:2]) == (3, (high - low) / 2, (3, 1)) and high > low
    assert count_above(values[:, :2], 0.34).margin is None
