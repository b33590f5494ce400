"""Rows of two results: paired differences by hand, subjects that are the same, and what came and went."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from sinkscope.measure.merge import CAME, SAME, WENT, merge
from sinkscope.results.row import Mean, Row

TEXTS = ("a", "b", "c", "d")


def one(value: float = 1.0, name: str = "x", about: str = "", **more) -> Row:
    return Row("t", name, {"n": Mean(value, **more)}, about=about)


def test_a_change_is_the_mean_of_paired_differences_with_students_interval():
    """Texts are paired by their names and not by their order; a text that one result lacks counts in neither."""
    first, second = (30.0, 34.0, 20.0, 9.0), (29.0, 33.0, 17.0, 90.0)
    before = Row("t", "x", {"n": Mean(5.0, 14.0, first)}, texts=TEXTS)
    after = Row("t", "x", {"n": Mean(7.0, 14.0, second[::-1])}, texts=("e", "c", "b", "a"))
    (row,) = merge([before], [after])
    differences = np.array([-1.0, -1.0, -3.0])
    half = stats.t.ppf(0.975, 2) * differences.std(ddof=1) / np.sqrt(3)
    ends = [row.get(end) for end in ("change", "lower", "upper")]
    assert ends == pytest.approx([differences.mean(), differences.mean() - half, differences.mean() + half])
    assert (row.get("before"), row.get("after"), row.get("texts")) == pytest.approx((28.0, 79 / 3, 3))
    assert (row.name, row.note, row.table) == ("x: n", "t", SAME)  # three texts are few


def test_subjects_are_the_same_by_their_names_but_for_numbers_and_by_common_layers():
    before = [one(1, about="Spike at 29 places, layers 2-8"), one(2, about="Spike at 3 places, layers 11-29")]
    after = [one(3, about="Spike at 30 places, layer 8"), one(4, about="Spike at 9 places, layers 12-30")]
    rows = merge(before, after)
    assert {(row.about, row.get("before"), row.get("after")) for row in rows} == {
        (before[0].about, 1.0, 3.0),
        (before[1].about, 2.0, 4.0),
    }
    apart = merge(before[:1], [one(4, about="Spike at 9 places, layers 9-12")])
    assert [(row.table, row.name) for row in apart] == [
        (CAME, "Spike at 9 places, layers 9-12"),
        (WENT, "Spike at 29 places, layers 2-8"),
    ]
