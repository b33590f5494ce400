"""AdaKV (Feng et al. 2024, section 3 and algorithm 1): SnapKV with a budget of each head's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.kv.policy import At
from sinkscope.kv.registry import register_policy
from sinkscope.kv.snapkv import SnapKV


@register_policy("adakv")
@dataclass(frozen=True, kw_only=True)
class AdaKV(SnapKV):
    """Score as SnapKV; the heads of a layer share one budget, so a head whose votes are spread wide keeps more.

    The highest scores of all kv heads of a layer are taken together, as many as the budgets of the heads add up to.
    A head then keeps `1 - floor` times the number of its own among them, and `floor` times its even share, rounded
    down. Window and `first` are kept in every head, out of the budget. `budget` is the mean over the heads of a layer;
    heads are ragged, so `run.usage` has fewer logical than physical bytes.

    Attributes:
        floor: part of the budget that is shared evenly: 0.2, as the authors advise for models whose query heads share
            kv heads (their first scripts have 0.5).

    Example:
        >>> AdaKV(budget=1024).floor
        0.2
    """

    floor: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor <= 1:
            raise SinkscopeError(f"AdaKV: floor={self.floor}: expected a share of the budget from 0 to 1")

    def select(
        self, scores: Float[Tensor, "batch kv_head slot"], at: At, budget: int | Int[Tensor, " batch"]
    ) -> Bool[Tensor, "batch kv_head slot"]:
        """Window, first tokens, and in every head as many of the highest scores as fall to it."""
        pos = at.kv.pos
        protected = (pos >= 0) & ((pos < self.first) | (pos >= at.length[:, None, None] - self.last))
        free = (pos >= 0) & ~protected
        tokens = torch.as_tensor(budget, device=pos.device).expand(len(pos))
        base = (tokens[:, None] - protected.sum(-1)).clamp(min=0)
        ranked = scores.float().masked_fill(~free, -torch.inf)
        total = base.sum(1)
        share = ((_rank(ranked.flatten(1)) < total[:, None]).view_as(free) & free).sum(-1)
        # A little more than exact, so that rounding down takes no whole number down.
        even = ((1 - self.floor) * share.double() + self.floor * base + 1e-6).floor().long()
        # All fit: nothing has to go.
        mine = torch.where((free.sum((1, 2)) <= total)[:, None], share, even)
        return protected | ((_rank(ranked) < mine[..., None]) & free)


def _rank(scores: Tensor) -> Tensor:
    """0 for the highest along the last dimension; of equal ones the later is higher."""
    order = scores.argsort(dim=-1, stable=True).flip(-1)
    index = torch.arange(scores.shape[-1], device=scores.device)
    return torch.empty_like(order).scatter_(-1, order, index.expand_as(order))
