"""Take given tokens out of the cache once a prompt has been read, to see what depends on them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from sinkscope.hooks.edit.base import Intervention, Run
from sinkscope.kv.cache_state import Moment
from sinkscope.kv.session import Session


@dataclass(frozen=True, eq=False)
class RemoveTokens(Intervention):
    """Evict tokens of the prompt from every layer and head, before the first generated token is read.

    It chooses nothing, so it acts beside a policy, after what was entered before it.

    Attributes:
        removed: Which true positions of each row go; all rows have prompts of this length.
    """

    removed: Bool[Tensor, "row pos"]

    def enter(self, run: Run, key: int) -> None:
        """Own the cache, and act when a prompt has ended."""
        session = Session.of(run)
        session.own_cache()
        session.before_decode(self._evict)

    def _evict(self, moment: Moment) -> None:
        if not moment.prefill_ended:
            return
        for kv in moment.layers:
            kv.evict_others(~self.removed)
