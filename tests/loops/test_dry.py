"""The DRY sampler against its definition, written out token by token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

import sinkscope as ss

ROWS = st.integers(2, 40).flatmap(
    lambda length: st.lists(st.lists(st.integers(0, 4), min_size=length, max_size=length), min_size=1, max_size=3)
)


def losses(ids: list[int], multiplier: float, base: float, allowed: int, broken: set[int]) -> dict[int, float]:
    """Compare the end of the row with what stands before every earlier token."""
    lost: dict[int, float] = {}
    for place in range(1, len(ids)):
        length = 0
        while length < place and ids[place - 1 - length] == ids[-1 - length] not in broken:
            length += 1
        if length >= allowed:
            lost[ids[place]] = max(lost.get(ids[place], 0.0), multiplier * base ** (length - allowed))
    return lost


@given(
    ROWS,
    st.sampled_from([0.8, 2.0]),
    st.sampled_from([1.0, 1.75]),
    st.integers(1, 4),
    st.sets(st.integers(0, 4), max_size=2),
)
def test_dry_against_its_definition(rows, multiplier, base, allowed, broken):
    scores = torch.zeros(len(rows), 6)
    found = ss.loops.DRY(multiplier, base, allowed, ignore=sorted(broken))(torch.tensor(rows), scores)
    assert not scores.any(), "the scores of the caller stay"
    for row, ids in enumerate(rows):
        expected = torch.zeros(6)
        for token, loss in losses(ids, multiplier, base, allowed, broken).items():
            expected[token] = -loss
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-4)


def test_a_loss_beyond_all_numbers_forbids_the_token():
    for dtype in (torch.float32, torch.float16):
        scores = ss.loops.DRY(base=1e6)(torch.tensor([[5, 6] * 40]), torch.zeros(1, 9, dtype=dtype))
        assert scores[0, 5] <= -6e4 and not scores.isnan().any() and scores[0, 4] == 0
