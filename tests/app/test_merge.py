"""Rows of two results: paired differences by hand, subjects that are the same, and what came and went."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from sinkscope.app.compare import CAME, CHANGED, SAME, UNJUDGED, WENT, merge
from sinkscope.results.row import Mean, Row


def one(value: float = 1.0, about: str = "", **more) -> Row:
    return Row("t", "x", {"n": Mean(value, **more)}, about=about)


def test_a_change_is_the_mean_of_paired_differences_with_students_interval():
    """Texts are paired by their names and not by their order; a text that one result lacks counts in neither."""
    first, second = (30.0, 34.0, 20.0, 9.0), (29.0, 33.0, 17.0, 90.0)
    before = Row("t", "x", {"n": Mean(5.0, 14.0, first)}, texts=tuple("abcd"))
    after = Row("t", "x", {"n": Mean(7.0, 14.0, second[::-1])}, texts=tuple("ecba"))
    (row,) = merge([before], [after])
    differences = np.array([-1.0, -1.0, -3.0])
    half = stats.t.ppf(0.975, 2) * differences.std(ddof=1) / np.sqrt(3)
    assert (row.get("change"), row.margin("change")) == pytest.approx((differences.mean(), half))
    assert (row.get("before"), row.get("after"), row.get("texts")) == pytest.approx((28.0, 79 / 3, 3))
    assert (row.name, row.note, row.table) == ("x: n", "t", SAME)  # three texts are few


def test_without_texts_the_margin_is_that_of_both_and_without_margins_nothing_is_judged():
    (row,) = merge([one(1.0, margin=0.3)], [one(1.4, margin=0.4)])
    assert (row.table, row.margin("change")) == (SAME, pytest.approx(0.5))
    assert [row.table for row in merge([one(1.0)], [one(9.0, margin=0.4)])] == [UNJUDGED]
    for after, verdict in ((100.9, SAME), (101.1, CHANGED)):  # by less than 1 %, or by more
        assert [row.table for row in merge([one(100.0, margin=0.1)], [one(after, margin=0.1)])] == [verdict]


def test_subjects_are_the_same_by_their_names_but_for_numbers_and_by_common_layers():
    before = [one(1, "Spike at 29 places, layers 2-8"), one(2, "Spike at 3 places, layers 11-29")]
    after = [one(3, "Spike at 30 places, layer 8"), one(4, "Spike at 9 places, layers 12-30")]
    rows = merge(before, after)
    assert [(row.about, row.get("after")) for row in rows] == [(before[0].about, 3.0), (before[1].about, 4.0)]
    later = [one(5, "Spike at 9 places, layers 7-11"), one(6, "Spike at 9 places, layers 2-9")]  # by most common layers
    assert [(row.about, row.get("after")) for row in merge(before, later)] == [
        (before[0].about, 6.0),
        (before[1].about, 5.0),
    ]
    apart = merge(before[:1], [one(4, "Spike at 9 places, layers 9-12")])
    assert [(row.table, row.name) for row in apart] == [
        (CAME, "Spike at 9 places, layers 9-12"),
        (WENT, "Spike at 29 places, layers 2-8"),
    ]
