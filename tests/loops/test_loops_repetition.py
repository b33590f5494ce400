"""Repetition of any period: against the one at the end of each beginning, and planted cycles."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkscope.loops import Monitor, tail_period
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


@pytest.mark.parametrize("period", [1, 3, 17, 64, 255, 2048])
def test_a_planted_cycle_of_any_period(period):
    """The alarm comes at the 64th token after the second copy."""
    rng = random.Random(period)
    before = [rng.randrange(50_000) for _ in range(rng.randrange(100, 3000))]
    piece = [50_000 + rng.randrange(50_000) for _ in range(period)]
    monitor = Monitor()
    ids = before + piece * (3 + -(-64 // period))
    steps = [monitor.update(token) for token in ids]
    first = next(step for step in steps if step.trigger)
    assert first.step == len(before) + 2 * period + 64
    assert first.tail[:2] == (period, len(before))
    assert first.tail.repeats == (first.step - len(before)) / period
