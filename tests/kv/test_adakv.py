"""AdaKV's budgets of the heads where a number is whole, or all slots fit; the reference has the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sinkscope.kv import AdaKV, KeptPerRow, LayerMoment


class _At(LayerMoment):
    """A layer that holds tokens at these positions, without a run."""

    def __init__(self, pos: Tensor, budget: int):
        vars(self).update(kv=SimpleNamespace(pos=pos), rows=KeptPerRow((budget,), (0,), (3,)))

    @property
    def length(self) -> Tensor:
        return self.kv.pos[:, 0].amax(-1) + 1


@pytest.mark.parametrize(
    ("slots", "empty", "budget", "floor", "kept"),
    [
        # Numbers that are whole are not rounded down: 0.7 * 6 + 0.3 * 6 is a little less than 6.
        (16, 0, 9, 0.3, [9, 9]),
        (346, 0, 326, 0.2, [326, 326]),
        (16, 11, 11, 0.2, [16, 5]),  # less than the budget is there
    ],
)
def test_the_heads_share_a_budget(slots, empty, budget, floor, kept):
    pos = torch.arange(slots).repeat(1, 2, 1)
    pos[0, 1, 2 : 2 + empty] = -1
    policy = AdaKV(budget=budget, window=3, floor=floor)
    keep = policy.select(torch.arange(float(slots)).repeat(1, 2, 1), _At(pos, budget), budget)
    assert keep[0].sum(1).tolist() == kept
