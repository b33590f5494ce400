"""TOVA (Oren et al. 2024, section 4) keeps the tokens to which the newest query attends most."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from jaxtyping import Float
from torch import Tensor

from sinkscope.engine.run import Run
from sinkscope.kv.attention_rows import AttentionRows, RowWatcher, watch
from sinkscope.kv.policy import LayerMoment, Policy, unseen_queries
from sinkscope.kv.registry import register_policy
from sinkscope.models.target import Target


@register_policy("tova")
@dataclass(frozen=True, kw_only=True)
class TOVA(Policy):
    """Keep the tokens to which the newest query attends most. Neither first nor recent tokens are protected.

    Attention is the mean over the query heads of a layer, as in the paper, so every kv head of a layer keeps the same
    tokens. The newest token is scored like any other; `last=1` always keeps it. Padding must
    be on the left.

    Example:
        >>> TOVA(budget=512).last
        0
    """

    def watch(self, run: Run) -> None:
        """Watch the newest query of every layer."""
        watch(run, RowWatcher(partial(self._note, run.target), last=1))

    def _note(self, target: Target, rows: AttentionRows) -> None:
        if rows.kv is not None:  # there is a cache
            newest = target.whole_heads(rows.probs[:, :, -1:], target.n_heads).mean(1)
            rows.kv.numbers["tova"] = newest.expand(-1, rows.kv.keys.shape[1], -1)

    def scores(self, at: LayerMoment) -> Float[Tensor, "batch kv_head slot"]:
        """Score by the attention of the newest query.

        Raises:
            UnsupportedError: It was read outside of the `with`.
        """
        if "tova" not in at.kv.numbers:
            raise unseen_queries()
        return at.kv.extra("tova")
