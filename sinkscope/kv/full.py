"""The policy that keeps everything, as the control of every other one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.engine.run import Run
from sinkscope.files.records import Budget
from sinkscope.kv.keeper import CacheKeeper
from sinkscope.kv.policy import LayerMoment, Policy
from sinkscope.kv.registry import register_policy


@register_policy("full")
@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keep everything; `run.usage` reports what this costs.

    Example:
        >>> Full().budget
        1.0
    """

    budget: Budget = field(default=1.0, kw_only=False)

    def enter(self, run: Run, key: int) -> None:
        """Count the tokens, and leave the cache as it is."""
        CacheKeeper.of(run, self.shown_name, self.first)

    def scores(self, at: LayerMoment) -> Float[Tensor, "batch kv_head slot"]:
        """Score all slots the same."""
        return torch.zeros(at.kv.pos.shape, device=at.kv.pos.device)
