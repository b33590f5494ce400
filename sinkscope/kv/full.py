"""The whole cache, as every other policy is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.interventions.base import Run
from sinkscope.kv.policy import At, Policy
from sinkscope.kv.registry import register_policy
from sinkscope.kv.session import Session


@register_policy("full")
@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keep everything; `run.usage` says what that costs.

    Example:
        >>> Full().budget
        1.0
    """

    budget: int | float = 1.0

    def enter(self, run: Run, key: int) -> None:
        """Count, and leave the cache alone."""
        session = Session.of(run)
        session.claim(self)
        session.own_cache()

    def scores(self, at: At) -> Float[Tensor, "batch kv_head slot"]:
        """All the same."""
        return torch.zeros(at.kv.pos.shape, device=at.kv.pos.device)
