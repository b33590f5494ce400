"""What LoopGuard keeps: the plan's numbers against Eqs. 10 and 11, written down a second time with sets."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sinkscope.loops.guard.cut import Retention, ranges_of, tokens_to_keep


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, range, Retention, int]:
    budget = draw(st.integers(1, 80))
    anchors = draw(st.integers(0, budget - 1))
    recent = draw(st.none() | st.integers(1, 60))
    retention = Retention(budget=budget, anchors=anchors, recent=recent)
    length = draw(st.integers(1, 200))
    gone = draw(st.sets(st.integers(0, length - 1)))
    bad = range(draw(st.integers(0, length)), draw(st.integers(0, length)))
    return [p for p in range(length) if p not in gone], length, bad, retention, draw(st.integers(0, 9))


@given(cases())
def test_every_plan_is_within_the_budget_and_follows_the_equations(case):
    held, length, bad, retention, level = case
    made = tokens_to_keep(held, length, bad, retention, level)
    keep, every = set(made), set(held)
    assert made == sorted(keep) and keep <= every and len(keep) <= retention.budget
    out = set(bad)
    first = every & set(range(retention.anchors))
    anchors = first
    if retention.recent is None:  # they keep no copies of the loop
        anchors = first - out | first & {0}
    if retention.recent is None:  # the window is what the latest clean tokens need
        latest = sorted(every - anchors - out)[-retention.recent_tokens(level) :]
        window = set(range(latest[0] if latest else length, length))
    else:
        window = set(range(length - retention.recent, length))
    clean = (every & window) - anchors - out
    history = every - window - anchors - (out if retention.recent is None else set())
    assert anchors <= keep
    assert keep & window - anchors <= clean, "a token of a bad block of the recent window is kept"
    recent = min(len(clean), retention.recent_tokens(level))
    sparse = min(len(history), retention.sparse_tokens)
    assert (len(keep & clean), len(keep & history), len(keep)) == (recent, sparse, len(anchors) + sparse + recent)
    if clean:
        assert keep & clean == set(sorted(clean)[-retention.recent_tokens(level) :])
    ranges = ranges_of(made)
    assert [p for start, stop in ranges for p in range(start, stop)] == made
    assert all(a[1] < b[0] for a, b in pairwise(ranges))


def test_retention_has_the_papers_sizes():
    retention = Retention(recent=256)
    assert [retention.recent_tokens(level) for level in range(5)] == [128, 64, 32, 16, 16]
    made = tokens_to_keep(range(5000), 5000, range(4900, 5000), retention)
    assert len(made) == 32 + 864 + 128 and ranges_of(made)[0] == (0, 32)
    assert ranges_of(made)[-1] == (4772, 4900), "the latest clean tokens, up to the bad tail"
