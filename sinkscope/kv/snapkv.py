"""SnapKV and AdaKV keep the tokens that the end of the prompt attends to, and their neighbours.

SnapKV (Li et al. 2024, section 4 and listing 1) gives every head the same budget. AdaKV (Feng et al. 2024, section 3
and algorithm 1) shares the budget between the heads of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Natural, Share, check_fields
from sinkscope.kv.policy import At, Policy, register_policy
from sinkscope.kv.session import Session


@register_policy("snapkv")
@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Compress the prompt once: the last queries vote for earlier tokens, and pooling spreads votes to neighbours.

    Votes are summed per query head, pooled, and then combined by `reduce` over the query heads of a kv head; the
    paper's code keeps one cache per query head. The window itself is always kept. Generated tokens are kept too, unless
    `every` is a number; the latest queries then vote, including those of generated tokens. Padding must be on the
    left.

    Attributes:
        window: Length of the observation window in tokens; 64 in the paper's text, 32 in its LongBench runs.
        kernel: Width of the pooling; 5 in the paper's text, 7 in its LongBench runs.
        pooling: "avg", with zeros beyond the ends, or "max", as in the paper's LongBench runs.

    Example:
        >>> SnapKV(budget=1024, window=32, kernel=7, pooling="max").last
        32
    """

    window: Natural = 64
    kernel: Natural = 5
    pooling: Literal["avg", "max"] = "avg"
    every: Natural | Literal["prefill"] = "prefill"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kernel % 2 == 0:
            raise SinkscopeError(f"{type(self).__name__}: kernel={self.kernel}: expected an odd kernel")
        object.__setattr__(self, "last", max(self.last, self.window))
        super().__post_init__()

    def watch(self, session: Session, key: int) -> None:
        """Ask for the latest queries."""
        session.window_queries(self.window, decoding=self.every != "prefill")

    def scores(self, at: At) -> Float[Tensor, "batch kv_head slot"]:
        """Score by pooled votes; tokens of the window get none."""
        # Padding votes only in rows that are shorter than the window, and such rows lose no token.
        votes = at.session.window_rows(at.moment, at.layer, self.window).sum(2)
        kv_heads = at.kv.pos.shape[1]
        inside = (at.kv.pos >= at.length[:, None, None] - self.window).repeat_interleave(votes.shape[1] // kv_heads, 1)
        votes = votes.masked_fill(inside, 0)
        pool = functional.avg_pool1d if self.pooling == "avg" else functional.max_pool1d
        pooled: Tensor = torch.as_tensor(pool(votes, self.kernel, stride=1, padding=self.kernel // 2))
        return self.group(pooled, kv_heads)


@register_policy("adakv")
@dataclass(frozen=True, kw_only=True)
class AdaKV(SnapKV):
    """Score like SnapKV; the heads of a layer share one budget, so a head with widely spread votes keeps more.

    The highest scores of all kv heads of a layer are pooled, up to the sum of the heads' budgets. Each head then keeps
    `1 - floor` times its number of slots in that pool plus `floor` times its even share, rounded down. Window and
    `first` are kept in every head and count towards the budget. `budget` is the mean over the heads of a layer. Heads
    are ragged, so `run.usage` reports fewer logical than physical bytes.

    Attributes:
        floor: Part of the budget that is shared evenly. The default of 0.2 is what the authors advise for models whose
            query heads share kv heads (their first scripts have 0.5).

    Example:
        >>> AdaKV(budget=1024).floor
        0.2
    """

    floor: Share = 0.2

    def select(
        self, scores: Float[Tensor, "batch kv_head slot"], at: At, budget: int | Int[Tensor, " batch"]
    ) -> Bool[Tensor, "batch kv_head slot"]:
        """Choose the window, the first tokens and, in every head, as many of the highest scores as its share allows."""
        pos = at.kv.pos
        protected = (pos >= 0) & self.protected(at, budget)
        free = (pos >= 0) & ~protected
        tokens = torch.as_tensor(budget, device=pos.device).expand(len(pos))
        base = (tokens[:, None] - protected.sum(-1)).clamp(min=0)
        ranked = scores.float().masked_fill(~free, -torch.inf)
        total = base.sum(1)
        share = ((_rank(ranked.flatten(1)) < total[:, None]).view_as(free) & free).sum(-1)
        # Slightly more than the exact number, so that rounding down does not lower a whole number.
        even = ((1 - self.floor) * share.double() + self.floor * base.double() + 1e-6).floor().long()
        # If all tokens fit, none has to go.
        mine = torch.where((free.sum((1, 2)) <= total)[:, None], share, even)
        return protected | ((_rank(ranked) < mine[..., None]) & free)


def _rank(scores: Tensor) -> Tensor:
    """Rank of each score along the last dimension: 0 for the highest; among equal scores the later one is higher."""
    order = scores.argsort(dim=-1, stable=True).flip(-1)
    index = torch.arange(scores.shape[-1], device=scores.device)
    return torch.empty_like(order).scatter_(-1, order, index.expand_as(order))
