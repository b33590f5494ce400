"""The attention of a TransformerBridge, which it computes itself: hook points mask scores and show rows.

For some architectures (OPT) the bridge calls the wrapped model's attention. The tap has then seen it, and nothing is
done here. A bridge builds the whole query x key matrix in every layer, so use the plain model for long contexts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from sinkscope.kv.attention_watch import AttentionWatch
from sinkscope.models.grouped_heads import per_query_head


class BridgeAttention:
    """Does on a TransformerBridge what the attention tap does elsewhere."""

    def __init__(self, watch: AttentionWatch) -> None:
        self.watch = watch
        self.target = watch.target
        self.now = watch.now

    def hooks(self) -> list[tuple[Any, str, Any]]:
        """The hooks of all layers."""
        points = self.target.model.hook_dict
        hooks: list[tuple[Any, str, Any]] = []
        for layer in range(self.target.n_layers):
            attn = f"blocks.{layer}.attn"
            hooks.append((points[f"{attn}.hook_attn_scores"], "post", partial(self._mask_scores, layer)))
            hooks.append((points[f"{attn}.hook_pattern"], "post", partial(self._show_rows, layer)))
            # In models without rotary positions, the projection gives the queries that attend. Where rotary positions
            # are applied elsewhere (NeoX, Phi-3), neither hook fires, and `window_rows` says so.
            point = points.get(f"{attn}.hook_rot_q")
            if point is None and self.target.adapter.absolute_positions:
                point = points.get(f"{attn}.q.hook_out")
            if point is not None:
                hooks.append((point, "post", partial(self._note_query, layer)))
        return hooks

    def _note_query(self, layer: int, _module: Any, _args: Any, _kwargs: Any, query: Tensor) -> None:
        if self.now.call is None:
            return
        if query.ndim == 3:  # a projection
            query = rearrange(query, "batch pos (head d_head) -> batch head pos d_head", head=self.target.n_heads)
        self.now.bridge_queries[layer] = query  # kept only if scores follow, which are those of the bridge

    def _mask_scores(
        self, layer: int, _module: Any, _args: Any, _kwargs: Any, scores: Float[Tensor, "batch head query slot"]
    ) -> Tensor | None:
        if self.now.call is None:
            return None
        query = self.now.bridge_queries.pop(layer, None)
        if query is not None:
            self.watch.note_queries(layer, query)
        kv = self.now.layer(layer)
        if kv is None:
            return None
        visible = per_query_head(self.watch.view(layer, kv.pos).sees(), scores.shape[1])
        return torch.where(visible, scores, torch.finfo(scores.dtype).min)

    def _show_rows(
        self, layer: int, _module: Any, _args: Any, _kwargs: Any, pattern: Float[Tensor, "batch head query slot"]
    ) -> None:
        watchers = self.watch.watchers_of(layer)
        if self.now.call is None or not watchers or layer in self.now.tapped_layers:
            return
        like_keys = rearrange(pattern[:, : self.target.n_kv_heads, 0], "batch kv_head slot -> batch kv_head slot 1")
        view = self.watch.view(layer, like_keys)
        for watcher in watchers:
            first = watcher.first_query(pattern.shape[2])
            self.watch.show_rows(watcher, layer, view, None, first, pattern[:, :, first:].float())
