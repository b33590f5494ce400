"""The latest queries of each layer, by whose attention a policy such as SnapKV scores what the cache holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.engine.attention import Attention, View
from sinkscope.engine.step import Call
from sinkscope.kv.cache import CacheLayer


@dataclass(frozen=True, eq=False)
class LatestQueries:
    """The latest queries of a layer.

    Attributes:
        query: Queries after rotary.
        pos: Their true positions; -1 at padding.
        window: How far back they see; None if they see everything.
        module: The attention module.
        probs: Gives rows of queries and keys of the layer under a mask (`Attention.probs_function`).
    """

    query: Float[Tensor, "batch head query d_head"]
    pos: Int[Tensor, "batch query"]
    window: int | None
    module: Any
    probs: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    @classmethod
    def of(
        cls, attention: Attention, call: Call, window: int | None, earlier: LatestQueries | None, count: int
    ) -> LatestQueries:
        """Return the latest `count` queries after an attention; `earlier`: those before it.

        They are copies: a part of the queries of a prompt would keep all of them in memory.
        """
        query = attention.query.detach()
        pos = call.on(query.device)
        before = count - query.shape[2]  # how many of the earlier ones stay
        if earlier is not None and before > 0:
            query = torch.cat([earlier.query[:, :, -before:], query], 2)
            pos = torch.cat([earlier.pos[:, -before:].to(pos), pos], 1)
        else:
            query = query[:, :, -count:].clone()
            pos = pos[:, -count:].clone()
        return cls(query, pos, window, attention.module, attention.probs_function())

    def take(self, rows: Int[Tensor, " row"]) -> LatestQueries:
        """Return those of other rows of the batch, by their numbers."""
        return replace(self, query=self.query[rows.to(self.query.device)], pos=self.pos[rows.to(self.pos.device)])

    def __deepcopy__(self, memo: object) -> LatestQueries:
        """Return itself, because nothing changes it: a copy would copy the attention module as well."""
        return self

    def rows(self, kv: CacheLayer, last: int) -> Float[Tensor, "batch head query slot"]:
        """Return the attention of the `last` ones, in float32, to what a layer holds; 0 at padding."""
        keys, pos = kv.keys, self.pos[:, -last:]
        if hasattr(self.module, "expand_kv"):  # the cache holds latent vectors, from which the module makes keys
            keys = self.module.expand_kv(kv.keys, kv.values)[0]
        mask = View(kv.pos, pos, self.window).sees_by_head(self.query.shape[1])
        return self.probs(self.query[:, :, -last:], keys, mask).mul_((pos >= 0)[:, None, :, None])
