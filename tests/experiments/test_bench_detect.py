"""The comparison of detectors: servers' rules against their wording, streams against what they should hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.bench_detect import Server

RUNS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 12)), min_size=1, max_size=4
).map(lambda parts: [token for piece, copies in parts for token in piece * copies])


@settings(max_examples=30)
@given(RUNS, st.integers(1, 3), st.integers(0, 4), st.integers(2, 4), st.integers(0, 20))
def test_a_server_stops_where_the_last_tokens_are_copies(ids, smallest, more, copies, tokens):
    """Block by block, as the pull requests describe it; with a least number of tokens, over that many."""
    rule = Server(smallest, smallest + more, copies, tokens=tokens)
    for i, token in enumerate(ids, 1):
        said = False
        for size in range(smallest, smallest + more + 1):
            long = max(copies * size, tokens)
            last = ids[max(0, i - long) : i]
            said |= len(last) == long and all(last[k] == last[k % size] for k in range(long))
        assert rule.add(token, 1.0) is said
