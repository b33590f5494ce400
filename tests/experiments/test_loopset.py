"""Detectors side by side: their scores are those that one counts by hand."""

from __future__ import annotations

from experiments.loopset import compare


def test_scores_are_counted_as_by_hand():
    some = [
        {"text": "ab" * 50, "class": "a", "start": 10},
        {"text": "ab" * 50, "class": "a", "start": 60},
        {"text": "cd" * 50, "class": "c", "start": 0},
        {"text": "ef" * 50, "class": "e", "start": None},
        {"text": "gh" * 50, "class": "g", "start": None},
    ]
    table = {"ab": 50, "ef": 3}
    found = compare.compare(some, {compare.OURS: lambda _: 20, "mine": lambda text: table.get(text[:2])})
    ours, mine = found["detectors"]
    assert (mine["recall"], mine["lowest"], mine["false_alarms"]) == (round(1 / 3, 4), 0.0, 0.5)
    assert (mine["their_delay"], mine["our_delay"], mine["we_first"]) == (40, 10, 1.0)  # of the one loop that both find
    assert mine["by_class"] == {"a": 0.5, "c": 0.0, "e": 1.0, "g": 0.0} and ours["recall"] == round(2 / 3, 4)
    assert (found["loops"], found["honest"], found["looping"]) == (3, 2, ["a", "c"])
