"""SnapKV (Li et al. 2024, section 4 and listing 1): what the end of the prompt attends to, with its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from sinkscope.errors import SinkscopeError
from sinkscope.kv._fields import check_fields
from sinkscope.kv.policy import At, Policy
from sinkscope.kv.registry import register_policy
from sinkscope.kv.session import Session


@register_policy("snapkv")
@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Compress the prompt once: the last queries vote for what came before them, and votes spread to neighbours.

    Votes are summed per query head, pooled, and then joined by `reduce` over the query heads of a kv head (the paper's
    code keeps one cache per query head). The window itself always stays. What is generated later stays too, unless
    `every` is a number: then the latest queries vote, generated ones included. Padding has to be on the left.

    Attributes:
        window: the observation window, in tokens: 64 in the paper's text, 32 in its LongBench runs.
        kernel: width of the pooling: 5, and 7 in its LongBench runs.
        pooling: "avg", with zeros beyond the ends, or "max", as in its LongBench runs.

    Example:
        >>> SnapKV(budget=1024, window=32, kernel=7, pooling="max").last
        32
    """

    window: int = 64
    kernel: int = 5
    pooling: Literal["avg", "max"] = "avg"
    every: int | Literal["prefill"] = "prefill"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise SinkscopeError(
                f"SnapKV: window={self.window}, kernel={self.kernel}: expected a window from 1 and an odd kernel from 1"
            )
        object.__setattr__(self, "last", max(self.last, self.window))
        super().__post_init__()

    def watch(self, session: Session, key: int) -> None:
        """Keep the latest queries."""
        session.window_queries(self.window, decoding=self.every != "prefill")

    def scores(self, at: At) -> Float[Tensor, "batch kv_head slot"]:
        """Votes, pooled; nothing for the window."""
        # Padding votes only in rows that are shorter than the window, and these lose nothing.
        votes = at.session.window_rows(at.moment, at.layer, self.window).sum(2)
        kv_heads = at.kv.pos.shape[1]
        inside = (at.kv.pos >= at.length[:, None, None] - self.window).repeat_interleave(votes.shape[1] // kv_heads, 1)
        votes = votes.masked_fill(inside, 0)
        pool = functional.avg_pool1d if self.pooling == "avg" else functional.max_pool1d
        pooled: Tensor = torch.as_tensor(pool(votes, self.kernel, stride=1, padding=self.kernel // 2))
        return self.group(pooled, kv_heads)
