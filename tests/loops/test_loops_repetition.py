"""Repetition of any period: against the one at the end of each beginning, and planted cycles."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sinkscope.loops import tail_period
from sinkscope.loops.text.repetition import TailRepetition

# Cycles of few different tokens, which hold repetitions of their own: any stretch of a few tokens comes several times.
PIECE = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 5)), min_size=1, max_size=4
).map(lambda parts: [token for some, copies in parts for token in some * copies])
RUNS = st.lists(st.tuples(PIECE, st.integers(1, 5)), min_size=1, max_size=3).map(
    lambda parts: [token for piece, copies in parts for token in piece * copies][:300]
)


@given(RUNS, st.sampled_from([(5, 12), (20, 20), (31, 30)]))
def test_three_exact_copies_are_found_at_their_last_token(ids, sizes):
    longest, shortest = sizes
    repeats = TailRepetition(longest, 3, shortest)
    for i, token in enumerate(ids):
        tail = repeats.add(token)
        assert tail == tail_period(ids[: i + 1], repeats=3, shortest=shortest, longest=longest)
