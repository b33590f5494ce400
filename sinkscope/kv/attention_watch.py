"""What policies and observers see of the attention of a run, and what replaces it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.hooks.edit.positions import Call
from sinkscope.kv.attention_rows import AttentionRows, Watcher
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.cache_state import CurrentCall
from sinkscope.kv.latest_queries import LatestQueries
from sinkscope.kv.windows import layer_window
from sinkscope.models.target import Target
from sinkscope.tap.call import Attention
from sinkscope.tap.listeners import Handler
from sinkscope.tap.view import View


class AttentionWatch:
    """Shows attention rows to those who asked, and computes attention where something else decides what is seen.

    Attributes:
        owns_cache: Whether the layers of the caches in use are ours.
        watchers: Who sees rows.
        queries_kept: How many of the latest queries of each layer are kept.
        windows: Sliding window of each layer; None where it sees everything.
        keeps_decoding_queries: Whether those of generated tokens are kept, too.
        replacement: Computes attention `[batch query head d_value]` in calls with several tokens, unless it gives None.
            It is called with the attention, whose `view` is known, and the layer's cache if that is a `CacheLayer`.
    """

    def __init__(self, target: Target, now: CurrentCall) -> None:
        self.target = target
        self.now = now
        self.owns_cache = False
        self.watchers: list[Watcher] = []
        self.replacement: Callable[[Attention, CacheLayer | None], Tensor | None] | None = None
        self.queries_kept = 0
        self.keeps_decoding_queries = False
        self.windows = [layer_window(target, layer) for layer in range(target.n_layers)]

    @property
    def is_seen(self) -> bool:
        """Whether anybody sees the rows of attention, or replaces what is computed from them."""
        return bool(self.watchers) or self.replacement is not None

    def handler(self, call: Call, layers: Sequence[CacheLayer], configs: frozenset[int]) -> Handler:
        """Return what handles the attention of a call.

        Args:
            call: The call.
            layers: The layers of the cache that this run owns.
            configs: Ids of the configurations of the model.
        """
        return Handler(self.see, configs, replaces_mask=self.now.own_masks, idle=not self._is_needed(call, layers))

    def _is_needed(self, call: Call, layers: Sequence[CacheLayer]) -> bool:
        """Whether the attention of this call has to be seen. If not, the model computes it alone, in less time."""
        if self.watchers or self.keeps_decoding_queries:
            return True
        if call.new > 1 or (self.now.state is not None and self.now.state.prefilling):
            return True
        if not self.now.own_masks:
            return False
        for kv in layers:
            if self.windows[kv.number] is not None or not kv.gapless:
                return True
        return False

    def _layer(self, layer: int) -> CacheLayer | None:
        """A layer's cache in this call; None if it is not a `CacheLayer`."""
        layers = getattr(self.now.cache, "layers", None)
        if not layers or layer >= len(layers):
            return None
        kv = layers[layer]
        return kv if isinstance(kv, CacheLayer) else None

    def see(self, attention: Attention) -> None:
        """Handle the attention of one layer in one call: decide what computes it and who sees its rows."""
        layer = attention.layer
        queries = attention.queries
        attention.viewed = self._view_of
        if self.queries_kept and not attention.is_repeated:
            self._note_queries(attention)
        if queries > 1 and self.owns_cache and not self.now.own_masks:
            self._check_view(attention)
        watchers = [watcher for watcher in self.watchers if watcher.layers is None or layer in watcher.layers]
        replaces = self.now.own_masks or (self.replacement is not None and queries > 1)
        if not watchers and not replaces:
            return
        if replaces:
            attention.mask_is_stale = self.now.own_masks
            attention.compute = self._compute
        for watcher in watchers:
            attention.show(partial(self._show_rows, watcher, attention), first=watcher.first_query(queries))

    def _last_sees_all(self, attention: Attention) -> bool:
        """Whether the last query certainly sees every slot of its layer."""
        kv = self._layer(attention.layer)
        return kv is not None and kv.gapless and self.windows[attention.layer] is None

    def _check_view(self, attention: Attention) -> None:
        """Refuse a layer whose last query sees other keys than our masks will show it.

        Raises:
            UnsupportedError: It does.
        """
        shown = attention.shown_to_last()
        if shown is None and self._last_sees_all(attention):
            return
        view, last = attention.view, slice(attention.queries - 1, attention.queries)
        assert view is not None
        sees = view.section(last, slice(None)).sees().all(1, keepdim=True)
        if shown is None:
            if bool((view.pos < 0).any()):
                return  # the model is not told of padding
            shown = torch.ones_like(sees)
        if bool((sees != shown).any()):
            if bool((view.query_pos[:, -1] < 0).any()):
                raise UnsupportedError(
                    f"rows of this batch are padded on the right, where {self.target.name} would write on: cache "
                    "policies and guards need padding on the left (tokenizer.padding_side = 'left')"
                )
            raise UnsupportedError(
                f"layer {attention.layer} of {self.target.name} hides keys in another way than by the window of its "
                "configuration, which cache policies and attention observers go by: use another model"
            )

    def _show_rows(self, watcher: Watcher, attention: Attention, first: int, probs: Tensor) -> None:
        call = self.now.call
        assert call is not None
        watcher.fn(
            AttentionRows(attention.layer, first, probs, self._pos(attention), self._layer(attention.layer), call)
        )

    def _compute(self, attention: Attention) -> tuple[Tensor, Tensor | None] | None:
        """Compute a prompt's attention by a replacement, or attention to the rest of a cache; None for stock."""
        if self.replacement is not None and attention.queries > 1:
            replaced = self.replacement(attention, self._layer(attention.layer))
            if replaced is not None:
                return replaced, None
        if not self.now.own_masks:
            return None
        return attention.under_view(), None

    def _view_of(self, attention: Attention) -> View | None:
        """What the queries of this call see; None if a single one certainly sees every slot."""
        call = self.now.call
        assert call is not None
        if attention.queries == 1 and self._last_sees_all(attention):
            return None
        return View(self._pos(attention), call.on(attention.key.device), self.windows[attention.layer])

    def _pos(self, attention: Attention) -> Int[Tensor, "batch kv_head slot"]:
        """True position of each slot, which is a column where the cache is not ours."""
        kv, key, call = self._layer(attention.layer), attention.key, self.now.call
        if kv is not None:
            return kv.pos
        assert call is not None
        columns = call.columns[:, -key.shape[2] :].to(key.device)
        # "batch slot -> batch kv_head slot" as a view: masks are then computed once for all heads.
        return columns[:, None].expand(key.shape[:3])

    def _note_queries(self, attention: Attention) -> None:
        """Keep the latest queries of a layer."""
        call, state, layer = self.now.call, self.now.state, attention.layer
        if call is None or state is None:
            return
        if call.new > 1 or state.prefilling or self.keeps_decoding_queries:
            earlier = state.queries.get(layer)
            latest = LatestQueries.of(attention, call, self.windows[layer], earlier, self.queries_kept)
            state.queries[layer] = latest
