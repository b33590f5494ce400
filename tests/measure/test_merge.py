"""Rows of two results: paired differences by hand, subjects that are the same, and what came and went."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from sinkscope.measure.merge import CAME, CHANGED, SAME, SMALL, UNJUDGED, WENT, merge
from sinkscope.results.row import Kind, Mean, Row

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


@pytest.mark.parametrize(
    ("after", "margins", "half", "verdict"),
    [
        (112.0, (3.0, 4.0), 5.0, CHANGED),
        (99.0, (3.0, 4.0), 5.0, SAME),
        (80.0, (3.0, 4.0), 5.0, CHANGED),
        (95.5, (0.0, 0.0), 0.0, SMALL),  # by half a per cent of its value
        (112.0, (3.0, None), 0.0, UNJUDGED),
    ],
)
def test_without_values_of_texts_both_margins_are_taken_together(after, margins, half, verdict):
    (row,) = merge([one(95.0, margin=margins[0])], [one(after, margin=margins[1])])
    moved = after - 95
    assert row.table == verdict and row.get("change") == moved
    if verdict != UNJUDGED:
        assert (row.get("lower"), row.get("upper"), row.get("texts")) == (moved - half, moved + half, 0)


@pytest.mark.parametrize("kind", ["share", "number"])
def test_right_and_wrong_answers_have_the_bounds_of_scores(kind: Kind):
    """Right answers alone do not say that none is wrong; that a number is a share is said, not guessed."""
    texts = tuple(map(str, range(6)))
    before, after = (Row("t", "x", {"n": Mean(v, 0.0, (v,) * 6, kind)}, texts=texts) for v in (0.0, 1.0))
    (row,) = merge([before], [after])
    assert row.table == CHANGED and (row.get("lower") < 0.9) == (kind == "share")


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


def test_rows_come_and_go_but_for_those_that_write_hardly_anything():
    """Whether a part is listed that writes a thousandth is up to the search that found it."""
    large, small = (
        Row("writers", name, {"share": Mean(value, kind="share")}) for name, value in (("L1.N1", 0.2), ("L1.N2", 0.001))
    )
    rows = merge([one(), large], [one(), small, Row("writers", "L1.N3", {"share": Mean(-0.3, kind="share")})])
    assert [(row.table, row.name, row.note) for row in rows if not row.numbers] == [
        (CAME, "L1.N3", "share -30%"),
        (WENT, "L1.N1", "share 20%"),
    ]


def test_words_change_and_controls_beside_a_number_are_no_number_of_their_own():
    before = Row("findings", "lost", {"share": Mean(0.5, 0.1, kind="share"), "control": Mean(0.1)}, "random")
    after = Row("findings", "lost", {"share": Mean(0.9, 0.1, kind="share"), "control": Mean(0.2)}, "busiest")
    word, number = merge([before], [after])
    assert (word.table, word.note, number.name, number.numbers["change"].kind) == (
        CHANGED,
        "random -> busiest",
        "lost",
        "share",
    )
