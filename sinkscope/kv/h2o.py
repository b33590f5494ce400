"""H2O (Zhang et al. 2023, section 4 and algorithm 1): the tokens with the most attention, plus recent tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.engine.run import Run
from sinkscope.files.records import Share, share_of
from sinkscope.kv.attention_rows import AttentionRows, RowWatcher, watch
from sinkscope.kv.policy import LayerMoment, Policy
from sinkscope.kv.registry import register_policy
from sinkscope.models.grouped_heads import in_groups


@register_policy("h2o")
@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Keep heavy hitters: the tokens that received the most attention, summed over all queries of prefill and decoding.

    A token's sum starts with its own query and ends when the token is evicted. It is the mean over the query heads of a
    kv head; the paper's models have one query head per kv head. Padding contributes no attention and has no score.

    Attributes:
        recent: Share of the budget for the latest tokens, which are kept whatever attention they received; half in the
            paper.

    Example:
        >>> H2O(budget=512).recent
        0.5
    """

    recent: Share = 0.5

    def watch(self, run: Run) -> None:
        """Watch every query of every layer."""
        watch(run, RowWatcher(self._add))

    def _add(self, rows: AttentionRows) -> None:
        if rows.kv is None:  # a call without a cache
            return
        probs = rows.probs
        if probs.shape[2] > 1 or not rows.kv.gapless:  # else a single token, which is no padding
            # As einsum, which would copy the rows: "batch query, batch head query slot -> batch head 1 slot".
            real = (rows.query_pos >= 0).to(probs)
            probs = real[:, None, None] @ probs
        received = in_groups(probs, rows.kv.keys.shape[1]).mean(2)
        earlier = rows.kv.numbers.get("h2o")
        if earlier is not None:  # in place; new slots have none
            received.narrow(-1, 0, earlier.shape[-1]).add_(earlier)
        rows.kv.numbers["h2o"] = received

    def scores(self, at: LayerMoment) -> Float[Tensor, "batch kv_head slot"]:
        """Score by the sums; recent tokens rank above all others."""
        budget = self.layer_budget(at)
        if isinstance(budget, int):
            recent: int | Tensor = share_of(self.recent, budget)
        else:
            recent = (budget.cpu().double() * self.recent + 1e-6).long().to(at.length.device)  # as `share_of` rounds
        late = at.kv.pos >= (at.length[:, None] - recent)[..., None]
        return at.kv.extra("h2o").masked_fill(late, torch.finfo(torch.float32).max)
