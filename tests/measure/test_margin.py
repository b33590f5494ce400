"""Two standard errors by bootstrap, against the formula."""

from __future__ import annotations

import numpy as np
import pytest

from sinkscope.measure.margin import margin_of


@pytest.mark.parametrize(("count", "errors"), [(4, 3.18), (12, 2.2), (60, 2.0)])
def test_the_margin_of_a_mean_is_two_standard_errors_and_more_of_few_samples(count, errors):
    values = np.random.default_rng(count).normal(3.0, 2.0, count)
    assert margin_of(values) == pytest.approx(errors * values.std(ddof=1) / np.sqrt(count), rel=0.15)
    assert margin_of(np.append(values, np.nan)) == margin_of(values)


def test_too_few_values_have_no_margin_and_equal_ones_none_at_all():
    assert margin_of(np.array([1.0, 2.0])) is None and margin_of(np.array([1.0, 2.0, np.nan])) is None
    assert margin_of(np.ones(5)) == 0.0
