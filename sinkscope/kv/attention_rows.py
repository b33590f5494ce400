"""Rows of attention as observers see them, and the observer that passes them to a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.hooks.call import Call
from sinkscope.kv.slots import Slots
from sinkscope.models.grouped_heads import per_query_head


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Attention rows of one layer in one call, for a chunk of queries.

    Attributes:
        layer: Decoder layer.
        first: Index of the first query among the call's new tokens.
        probs: `[batch head query slot]`, float32, after softmax.
        pos: True position of each slot, -1 if it holds no token.
        kv: The layer's cache; None if it is not a sinkscope cache.
        call: The forward call.
    """

    layer: int
    first: int
    probs: Float[Tensor, "batch head query slot"]
    pos: Int[Tensor, "batch kv_head slot"]
    kv: Slots | None
    call: Call

    @property
    def query_pos(self) -> Int[Tensor, "batch query"]:
        """True position of each query, -1 at padding."""
        return self.call.on(self.probs.device)[:, self.first : self.first + self.probs.shape[2]]

    def by_position(self, length: int) -> Float[Tensor, "batch head query pos"]:
        """Return the rows over the positions of a text of a length; a position that no slot holds gets nothing."""
        pos = per_query_head(self.pos, self.probs.shape[1])[:, :, None]
        by_position = self.probs.new_zeros(*self.probs.shape[:3], length)
        return by_position.scatter_add_(3, pos.clamp(min=0).expand_as(self.probs), self.probs * (pos >= 0))


@dataclass(frozen=True, eq=False)
class Watcher:
    """A function that sees attention rows.

    Attributes:
        fn: The function.
        layers: Layers that it sees; None for all.
        last: How many of the last queries of a call it sees; None for all.
    """

    fn: Callable[[AttentionRows], None]
    layers: list[int] | None
    last: int | None
