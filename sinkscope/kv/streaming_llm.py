"""StreamingLLM (Xiao et al. 2024, section 3.2): attention sinks and a window of the latest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.kv.policy import At, Policy, register_policy


@register_policy("streaming")
@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
    """Keep the first tokens, which serve as attention sinks, and the latest tokens.

    Attributes:
        first: Number of attention sinks; four in the paper. A budget of no more tokens is half sinks and half latest
            tokens; an event of kind "window" then says how many latest ones.

    Example:
        >>> StreamingLLM(budget=1024).first
        4
    """

    first: int = 4

    UNIFORM: ClassVar[bool] = True

    def first_kept(self, budget: Any) -> Any:
        """`first`, or half of a budget in which no latest token would be left."""
        missing = self.first - budget // 2
        return self.first - missing * (budget <= self.first)

    def scores(self, at: At) -> Float[Tensor, "batch kv_head slot"]:
        """Score later positions higher."""
        if at.moment.prefill_ended:
            budget = torch.as_tensor(at.memory["budget"]).expand(len(at.length))
            self.log_windows(at, budget - self.first_kept(budget), budget - self.first)
        return at.kv.pos.float()
