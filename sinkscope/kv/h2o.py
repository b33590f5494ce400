"""H2O (Zhang et al. 2023, section 4 and algorithm 1): the tokens that received most attention, and recent ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.kv.policy import At, Policy, register_policy
from sinkscope.kv.session import Rows, Session
from sinkscope.records import Share


@register_policy("h2o")
@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Keep heavy hitters: attention received from all queries so far, summed through prefill and decoding.

    The sum of a token starts with its own query and ends when it is evicted. `reduce` joins the query heads of a kv
    head query by query, before the sum (the paper's models have one query head per kv head). Padding neither gives nor
    counts.

    Attributes:
        recent: share of the budget that goes to the latest tokens, whatever they received; half in the paper.

    Example:
        >>> H2O(budget=512).recent
        0.5
    """

    recent: Share = 0.5

    def watch(self, session: Session, key: int) -> None:
        """See every query of every layer."""
        session.watch(self._add)

    def _add(self, rows: Rows) -> None:
        if rows.kv is None:  # a call without a cache
            return
        real = (rows.query_pos >= 0).to(rows.probs)[:, None, None, :]
        if self.reduce == "max":
            each = rows.probs.unflatten(1, (rows.pos.shape[1], -1)).amax(2)
            received = (real @ each)[:, :, 0]
        else:
            received = self.group((real @ rows.probs)[:, :, 0], rows.pos.shape[1])
        rows.kv.set_extra("h2o", rows.kv.extra("h2o") + received)

    def scores(self, at: At) -> Float[Tensor, "batch kv_head slot"]:
        """The sums; above all of them, the recent share."""
        recent = (torch.as_tensor(at.memory["budget"], device=at.length.device) * self.recent).long()
        late = at.kv.pos >= (at.length - recent)[:, None, None]
        return at.kv.extra("h2o").masked_fill(late, torch.finfo(torch.float32).max)
