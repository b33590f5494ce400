"""Which keys the queries of a call see, by true positions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtyping import Bool, Int
from torch import Tensor

from sinkscope.models.grouped_heads import per_query_head


class ChunkWindow(int):
    """A window that ends where the query's chunk of this many tokens begins (Llama 4)."""


@dataclass(frozen=True, eq=False)
class View:
    """Which keys the queries of a call see, by true positions.

    Attributes:
        pos: Position of each key; -1 where there is none.
        query_pos: Position of each query; -1 at padding.
        window: Keys this far back and further are not seen. None means all are seen.
    """

    pos: Int[Tensor, "batch kv_head key"]
    query_pos: Int[Tensor, "batch query"]
    window: int | None = None

    def section(self, queries: slice, keys: slice) -> View:
        """Return some of the queries and keys."""
        return replace(self, pos=self.pos[..., keys], query_pos=self.query_pos[:, queries])

    def sees(self) -> Bool[Tensor, "batch _ query key"]:
        """Return keys that hold a token, are not later than the query, and are inside the window.

        Padding queries see none; their output is never read.
        """
        pos = self.pos
        if pos.stride(1) == 0:  # the same in every head
            pos = pos[:, :1]
        # By indexing, because this runs for every generated token, where einops takes a tenth of the time.
        key = pos[:, :, None, :]  # "batch kv_head key -> batch kv_head 1 key"
        query = self.query_pos[:, None, :, None]  # "batch query -> batch 1 query 1"
        visible = (key <= query) & (key >= 0)
        if self.window is not None:
            visible = visible & (key > query - self.window)
        if isinstance(self.window, ChunkWindow):
            visible = visible & (key // self.window == query // self.window)
        return visible

    def sees_by_head(self, heads: int) -> Bool[Tensor, "batch _ query key"]:
        """Return the same for each query head, or once if it is the same for all."""
        return per_query_head(self.sees(), heads)
