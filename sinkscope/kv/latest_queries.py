"""The latest queries of each layer, by whose attention a policy such as SnapKV scores what the cache holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.hooks.edit.positions import Call
from sinkscope.kv.cache import CacheLayer
from sinkscope.tap.call import Attention
from sinkscope.tap.view import View


@dataclass(frozen=True, eq=False)
class LatestQueries:
    """The latest queries of a layer.

    Attributes:
        query: Queries after rotary.
        pos: Their true positions; -1 at padding.
        window: How far back they see; None if they see everything.
        module: The attention module.
        rows_by_view: Gives rows of queries and keys of the layer by a view (`Attention.row_function`).
    """

    query: Float[Tensor, "batch head query d_head"]
    pos: Int[Tensor, "batch query"]
    window: int | None
    module: Any
    rows_by_view: Callable[[Tensor, Tensor, View | None], Tensor]

    @classmethod
    def of(
        cls, attention: Attention, call: Call, window: int | None, earlier: LatestQueries | None, count: int
    ) -> LatestQueries:
        """The latest `count` queries after an attention; `earlier`: those before it."""
        query = attention.query
        pos = call.on(query.device)
        if earlier is not None and query.shape[2] < count:
            query = torch.cat([earlier.query, query], 2)
            pos = torch.cat([earlier.pos.to(pos), pos], 1)
        rows = attention.row_function()
        return cls(query[:, :, -count:].detach(), pos[:, -count:], window, attention.module, rows)

    def rows(self, kv: CacheLayer, call: Call, last: int) -> Float[Tensor, "batch head query slot"]:
        """The attention of the `last` ones, in float32, to what a layer of the cache holds before a call."""
        keys = kv.keys
        if hasattr(self.module, "expand_kv"):  # the cache holds latent vectors, from which the module makes keys
            keys = self.module.expand_kv(kv.keys, kv.values)[0]
        view = View(kv.pos, self.pos[:, -last:], self.window, call.earlier.pos.to(keys.device))
        return self.rows_by_view(self.query[:, :, -last:], keys, view)
