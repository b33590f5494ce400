"""AdaKV's budgets of the heads, against sorted lists."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sinkscope.kv import KeptPerRow, LayerMoment
from sinkscope.kv.adakv import AdaKV


class _At(LayerMoment):
    """A layer that holds tokens at these positions, without a run."""

    def __init__(self, pos: Tensor, budget: int, first: int, latest: int):
        vars(self).update(kv=SimpleNamespace(pos=pos), rows=KeptPerRow((budget,), (first,), (latest,)))

    @property
    def length(self) -> Tensor:
        return self.kv.pos[:, 0].amax(-1) + 1


def _keep(policy: AdaKV, scores: Tensor, budget: int, pos: Tensor | None = None) -> Tensor:
    pos = torch.arange(scores.shape[-1]).expand(scores.shape) if pos is None else pos
    return policy.select(scores, _At(pos, budget, *policy.always_kept(budget)), budget)


@given(
    heads=st.integers(1, 4),
    slots=st.integers(6, 30),
    budget=st.integers(5, 20),
    floor=st.sampled_from([0.0, 0.2, 1.0]),
    first=st.integers(0, 2),
    seed=st.integers(0, 99),
    ties=st.booleans(),
)
def test_adakv_divides_the_budget_among_heads_by_their_scores(heads, slots, budget, floor, first, seed, ties):
    policy = AdaKV(budget=budget, window=3, floor=floor, first=first)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(1, heads, slots, generator=generator) * torch.arange(1, heads + 1)[:, None]
    if ties:  # of equal scores the later head's counts more, and within a head the later slot's
        scores = scores.round()
    keep = _keep(policy, scores, budget)[0]
    safe = {p for p in range(slots) if p < first or p >= slots - 3}
    base = budget - len(safe)
    free = [(float(scores[0, h, p]), h, p) for h in range(heads) for p in range(slots) if p not in safe]
    best = sorted(free, reverse=True)[: heads * base]
    for head in range(heads):
        share = sum(h == head for _, h, _ in best)
        count = share if len(free) <= heads * base else math.floor((1 - floor) * share + floor * base + 1e-6)
        mine = sorted((s, p) for s, h, p in free if h == head)[::-1][:count]
        assert set(keep[head].nonzero().flatten().tolist()) == safe | {p for _, p in mine}
    assert int(keep.sum()) <= heads * budget


def test_whole_numbers_are_not_rounded_down():
    """0.7 * 6 + 0.3 * 6 is a little less than 6 in double precision, and 0.2 * 323 less than 64.6 in single."""
    for base, floor in ((6, 0.3), (12, 0.3), (323, 0.2)):
        scores = torch.arange(base + 8.0).repeat(1, 2, 1)  # the same in both heads, so each gets the same share
        keep = _keep(AdaKV(budget=base + 2, window=2, floor=floor), scores, base + 2)[0]
        assert keep.sum(-1).tolist() == [base + 2] * 2


def test_adakv_evicts_nothing_where_all_slots_fit():
    """The first head holds 10 slots beside the window and the second holds 2: 12 in all, which is the whole budget."""
    pos = torch.arange(12).repeat(1, 2, 1)
    pos[0, 1, :8] = -1
    keep = _keep(AdaKV(budget=8, window=2), torch.ones(1, 2, 12), 8, pos)
    assert torch.equal(keep, pos >= 0)
