"""The comparison of detectors: servers' rules against their wording, streams against what they should hold."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.bench_detect import COPIES, FORMS, HEALTHY, PERIODS, RULES, Server, first_alarm, honest, stream, table
from sinkscope.loops import tail_period

RUNS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 12)), min_size=1, max_size=4
).map(lambda parts: [token for piece, copies in parts for token in piece * copies])


@settings(max_examples=60)
@given(RUNS, st.integers(1, 3), st.integers(0, 4), st.integers(2, 4), st.integers(0, 20))
def test_a_server_stops_where_the_last_tokens_are_copies(
    ids: list[int], smallest: int, more: int, copies: int, tokens: int
) -> None:
    """Block by block, as the pull requests describe it; with a least number of tokens, over that many."""
    rule = Server(smallest, smallest + more, copies, tokens=tokens)
    for i, token in enumerate(ids, 1):
        said = False
        for size in range(smallest, smallest + more + 1):
            long = max(copies * size, tokens)
            last = ids[max(0, i - long) : i]
            said |= len(last) == long and all(last[k] == last[k % size] for k in range(long))
        assert rule.add(token, 1.0) is said


def test_a_server_that_looks_now_and_then() -> None:
    """Every 16th token, from the 64th on."""
    assert first_alarm(Server(1, 128, 3, tokens=48, every=16, after=64), [1] * 200, lambda _: 1.0) == 64
    ids = [*range(100, 171), *[1, 2] * 60]
    assert first_alarm(Server(1, 128, 3, tokens=48, every=16, after=64), ids, lambda _: 1.0) == 128
    assert first_alarm(Server(1, 128, 3, tokens=48), ids, lambda _: 1.0) == 71 + 48


def test_streams_are_prose_and_then_a_loop() -> None:
    text = [*range(10_000)]
    for period in (1, 16, 300):
        exact, near = (stream(text, period, form, random.Random(0)) for form in FORMS)
        tail = tail_period(exact)
        assert tail is not None and tail[:2] == (period, HEALTHY) and tail.repeats >= COPIES
        assert exact[:HEALTHY] == near[:HEALTHY] and len(exact) == len(near)
        changed = [i for i, (a, b) in enumerate(zip(exact, near, strict=True)) if a != b]
        assert len({(i - HEALTHY) // period for i in changed}) == len(changed) >= tail.repeats - 1


def test_honest_texts_are_sixty_and_others_with_another_seed() -> None:
    one, other = honest("one"), honest("other")
    assert len(one) == 60 == len(set(one.values())) and list(one) == list(other)
    same = {name for name in one if one[name] == other[name]}
    assert len(same) < 6, same


def test_the_table_has_a_row_for_each_rule() -> None:
    """Shares over all periods, the median of delays over what is allowed, and the largest cost."""
    rows = [{"period": p, "found": 1.0, "before": 0, "tokens": 2 * max(3 * p, 48), "copies": 1.0} for p in PERIODS]
    half = [{**row, "found": float(i % 2), "tokens": None} for i, row in enumerate(rows)]
    made = table(
        {
            "delays": {rule: {"exact": rows, "near": half} for rule in RULES},
            "alarms": {rule: {"texts": 60, "alarmed": 3} for rule in RULES},
            "microseconds": {rule: {"text": {1000: 1.0, 10_000: 2.5}, "loop": {1000: 2.0}} for rule in RULES},
        }
    )
    assert made.splitlines()[2] == "| default | 100% | 50% | 2.00 | 3 of 60 | 2.5 |"
    assert len(made.splitlines()) == 2 + len(RULES)
