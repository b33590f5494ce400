"""Rows of two results: paired differences by hand, subjects that are the same, and what came and went."""

from __future__ import annotations

from sinkscope.measure.merge import CAME, WENT, merge
from sinkscope.results.row import Mean, Row

TEXTS = ("a", "b", "c", "d")


def one(value: float = 1.0, name: str = "x", about: str = "", **more) -> Row:
    return Row("t", name, {"n": Mean(value, **more)}, about=about)


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
