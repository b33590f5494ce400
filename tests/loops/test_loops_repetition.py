"""Repetition of any period: against the one at the end of each beginning, planted cycles, and lists."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkscope.loops import Monitor, MonitorSettings, check, tail_period
from sinkscope.loops.text.repetition import NearRepetition

# Cycles of few different tokens, which hold repetitions of their own: any stretch of a few tokens comes several times.
PIECE = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 5)), min_size=1, max_size=4
).map(lambda parts: [token for some, copies in parts for token in some * copies])
RUNS = st.lists(st.tuples(PIECE, st.integers(1, 5)), min_size=1, max_size=3).map(
    lambda parts: [token for piece, copies in parts for token in piece * copies][:300]
)


@settings(max_examples=30)
@given(RUNS, st.sampled_from([5, 20, 64]), st.sampled_from([12, 20, 30]))
def test_three_exact_copies_are_found_at_their_last_token(ids, longest, shortest):
    repeats = NearRepetition(longest, 3, shortest, 0.0)
    for i, token in enumerate(ids):
        tail = repeats.add(token, i)
        assert tail == tail_period(ids[: i + 1], repeats=3, shortest=shortest, longest=longest)


@settings(max_examples=30)
@given(RUNS)
def test_tolerance_hides_no_exact_repetition(ids):
    """With noise there may be more, from an earlier start, and nothing less."""
    exact, tolerant = NearRepetition(64, 3, 12, 0.0), NearRepetition(64, 3, 12, 0.1)
    for i, token in enumerate(ids):
        one, other = exact.add(token, i), tolerant.add(token, i)
        assert one is None or (other is not None and other[1] <= one[1])


@pytest.mark.parametrize("period", [1, 2, 3, 5, 16, 17, 48, 64, 100, 255, 1000, 2047, 2048])
def test_a_planted_cycle_of_any_period(period):
    """The alarm comes in the middle of the third copy, or with the 48th token of a shorter loop."""
    rng = random.Random(period)
    before = [rng.randrange(50_000) for _ in range(rng.randrange(100, 3000))]
    piece = [50_000 + rng.randrange(50_000) for _ in range(period)]
    monitor = Monitor()
    ids = before + piece * max(3, -(-48 // period))
    steps = [monitor.update(token) for token in ids]
    first = next(step for step in steps if step.trigger)
    assert first.step == len(before) + max(math.ceil(2.5 * period), 48)
    assert first.tail[:2] == (period, len(before))
    assert first.tail.repeats == (first.step - len(before)) / period


def test_the_longest_period_is_a_limit():
    ids = [*range(101)] * 5
    assert check(ids, settings=MonitorSettings(tail_longest=100)).loops == 0
    assert check(ids, settings=MonitorSettings(tail_longest=101)).records[0].detected == 253


def near(period: int, rng: random.Random, copies: int) -> list[int]:
    """A cycle with one token of every copy replaced, at any place."""
    piece = [rng.randrange(1000) for _ in range(period)]
    made = []
    for _ in range(copies):
        copy = list(piece)
        copy[rng.randrange(period)] = rng.randrange(1000, 2000)
        made += copy
    return made


@pytest.mark.parametrize("period", [24, 32, 100, 500])
def test_a_loop_in_which_a_token_of_every_copy_is_another(period):
    """Found within a copy of the third, where it begins but for a copy; the exact rule never finds it."""
    late = []
    for seed in range(5):
        rng = random.Random(f"{period} {seed}")
        before = [rng.randrange(5000, 50_000) for _ in range(200)]
        ids = before + near(period, rng, 6)
        monitor = Monitor()
        step = next((s for s in map(monitor.update, ids) if s.trigger), None)
        late.append(float("inf") if step is None else (step.step - 200) / period)
        if step is not None:
            assert step.tail.period == period and 200 <= step.tail.start <= 200 + 3 * period
        exact = Monitor(MonitorSettings(tail_noise=0.0))
        assert not any(exact.update(token).trigger for token in ids)
    assert sorted(late)[2] <= 4 and min(late) >= 3


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("period", [12, 30, 60])
def test_a_list_that_counts_up_is_no_loop(period, slots):
    """One or two tokens change at the same places of every copy, however long it goes on. The tolerant one is asked."""
    ids = []
    for count in range(40):
        copy = [*range(period)]
        for slot in range(slots):
            copy[period // 2 * slot] = 1000 + count
        ids += copy
    monitor, tolerant = Monitor(), Monitor(MonitorSettings.variant("tolerant"))
    assert not any(monitor.update(token).trigger for token in ids)
    assert any(tolerant.update(token).trigger for token in ids) == (slots / period <= 0.1)
