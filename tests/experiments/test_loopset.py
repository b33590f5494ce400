"""Detectors side by side: rivals against what their rules say, scores against counting by hand, and the set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from experiments.loopset import compare
from experiments.loopset.compare import exact_copies


@given(
    pieces=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 12)), max_size=4),
    smallest=st.integers(1, 3),
    more=st.integers(0, 4),
    copies=st.integers(2, 4),
    tokens=st.integers(0, 20),
)
def test_a_server_stops_where_the_last_tokens_are_copies(pieces, smallest, more, copies, tokens):
    """Block by block, as the pull requests describe it; with a least number of tokens, over that many."""
    ids = [token for piece, count in pieces for token in piece * count]
    first = None
    for end in range(1, len(ids) + 1):
        for size in range(smallest, smallest + more + 1):
            long = max(copies * size, tokens)
            last = ids[max(0, end - long) : end]
            if first is None and len(last) == long and all(last[k] == last[k % size] for k in range(long)):
                first = end
    found = exact_copies(smallest, smallest + more, copies, " ".join(map(str, ids)), tokens=tokens)
    assert found == (None if first is None else 2 * first - 1)


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
