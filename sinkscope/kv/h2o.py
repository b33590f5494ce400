"""H2O (Zhang et al. 2023, section 4 and algorithm 1): the tokens with the most attention, plus recent tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.files.records import Share
from sinkscope.kv.attention_rows import AttentionRows
from sinkscope.kv.policy import LayerMoment, Policy
from sinkscope.kv.registry import register_policy
from sinkscope.kv.session import Session
from sinkscope.kv.slots import Slots
from sinkscope.models.grouped_heads import in_groups


@register_policy("h2o")
@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Keep heavy hitters: the tokens that received the most attention, summed over all queries of prefill and decoding.

    A token's sum starts with its own query and ends when the token is evicted. For each query, `reduce` combines the
    query heads of a kv head before summing; the paper's models have one query head per kv head. Padding contributes
    no attention and has no score.

    Attributes:
        recent: Share of the budget for the latest tokens, which are kept whatever attention they received; half in the
            paper.

    Example:
        >>> H2O(budget=512).recent
        0.5
    """

    recent: Share = 0.5

    KEEPS_BUDGET = True
    JOINS_LAYERS = True

    def watch(self, session: Session, key: int) -> None:
        """Watch every query of every layer."""
        session.watch(self._add, joins=self.JOINS_LAYERS)

    def _add(self, rows: AttentionRows) -> None:
        if rows.kv is None:  # a call without a cache
            return
        kv_heads = rows.kv.keys.shape[1]
        probs = rows.probs
        if probs.shape[2] == 1 and rows.kv.gapless:  # a single token, which is no padding
            _add_to(rows.kv, self.group(probs, kv_heads))
            return
        if self.reduce == "max":  # over the heads of a group, for every query
            probs = in_groups(probs, kv_heads).unflatten(2, (-1, probs.shape[2])).amax(2)
        # As einsum, which would copy the rows: "batch query, batch head query slot -> batch head slot".
        real = (rows.query_pos >= 0).to(probs)
        received = (real[:, None, None] @ probs)[:, :, 0]
        if self.reduce != "max":
            received = self.group(received, kv_heads)
        _add_to(rows.kv, received)

    def scores(self, at: LayerMoment) -> Float[Tensor, "batch kv_head slot"]:
        """Score by the sums; recent tokens rank above all others."""
        budget = self.budgets(at)
        length = at.length.view(-1, 1)
        if isinstance(budget, int):
            recent = int(budget * self.recent + 1e-6)  # so that rounding down does not lower a whole number
        else:
            recent = (budget.to(length.device).double() * self.recent + 1e-6).long()
        late = at.kv.pos >= (length - recent)[..., None]
        return at.kv.extra("h2o").masked_fill(late, torch.finfo(torch.float32).max)


def _add_to(kv: Slots, received: Float[Tensor, "batch kv_head slot"]) -> None:
    """Add the earlier sums to what was received now, in place; new slots have none."""
    earlier = kv.numbers.get("h2o")
    if earlier is not None:
        received.narrow(-1, 0, earlier.shape[-1]).add_(earlier)
    kv.numbers["h2o"] = received
