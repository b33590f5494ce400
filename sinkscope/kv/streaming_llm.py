"""StreamingLLM (Xiao et al. 2024, section 3.2): attention sinks and a window of the latest tokens."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from sinkscope.kv.policy import LayerMoment, Policy
from sinkscope.kv.registry import register_policy


@register_policy("streaming")
@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
    """Keep the first tokens, which serve as attention sinks, and the latest tokens.

    Tokens keep the positions at which they were read; the paper counts positions anew within the cache.

    Attributes:
        first: Number of attention sinks; four in the paper. A budget of no more tokens is half sinks and half latest
            tokens.

    Example:
        >>> StreamingLLM(budget=1024).first
        4
    """

    first: int = 4

    def always_kept(self, budget: int) -> tuple[int, int]:
        """Return `first`, or half of a budget that it would fill, and `last`."""
        return self.first if budget > self.first else budget // 2, self.last

    def scores(self, at: LayerMoment) -> Int[Tensor, "batch kv_head slot"]:
        """Score later positions higher."""
        return at.kv.pos
