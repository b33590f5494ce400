"""AdaKV's budgets of the heads, against sorted lists, also where scores are equal or all slots fit."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kv_reference import shared_budget
from torch import Tensor

from sinkscope.kv import AdaKV, KeptPerRow, LayerMoment


class _At(LayerMoment):
    """A layer that holds tokens at these positions, without a run."""

    def __init__(self, pos: Tensor, budget: int, first: int, latest: int):
        vars(self).update(kv=SimpleNamespace(pos=pos), rows=KeptPerRow((budget,), (first,), (latest,)))

    @property
    def length(self) -> Tensor:
        return self.kv.pos[:, 0].amax(-1) + 1


# Numbers that are whole are not rounded down: 0.7 * 6 + 0.3 * 6 is a little less than 6, and 0.2 * 323 less than 64.6.
@example(heads=2, slots=16, budget=9, floor=0.3, first=0, seed=None)
@example(heads=2, slots=346, budget=326, floor=0.2, first=0, seed=None)
@given(
    heads=st.integers(1, 4),
    slots=st.integers(6, 30),
    budget=st.integers(5, 20),
    floor=st.sampled_from([0.0, 0.2, 1.0]),
    first=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_the_heads_share_a_budget_by_their_scores(heads, slots, budget, floor, first, seed):
    """Of equal scores the later head's counts more, and within a head the later slot's; some slots may be empty."""
    policy = AdaKV(budget=budget, window=3, floor=floor, first=first)
    pos, scores = torch.arange(slots).repeat(1, heads, 1), torch.arange(float(slots)).repeat(1, heads, 1)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(1, heads, slots, generator=generator) * torch.arange(1, heads + 1)[:, None]
        if seed % 2:
            scores = scores.round()
        if seed % 3 == 0:  # less than the budget may be left
            pos[0, 1:, 2 : slots - 3] = -1
    keep = policy.select(scores, _At(pos, budget, *policy.always_kept(budget)), budget)[0]
    held, place = pos[0] >= 0, torch.arange(slots)
    sure = ((place < first) | (place >= slots - 3)).expand(heads, -1)
    base = (budget - (held & sure).sum(1)).clamp(min=0).tolist()
    assert torch.equal(keep, shared_budget(scores[0], held, sure, base, floor))
    assert int(keep.sum()) <= heads * budget
