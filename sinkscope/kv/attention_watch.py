"""What policies and observers see of the attention of a run, and what replaces it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.engine.attention import Attention, View
from sinkscope.engine.step import Call
from sinkscope.engine.tap import Handler
from sinkscope.errors import UnsupportedError
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.cache_state import Moment
from sinkscope.kv.latest_queries import LatestQueries
from sinkscope.kv.slots import Slots
from sinkscope.kv.windows import layer_window
from sinkscope.models.grouped_heads import per_query_head
from sinkscope.models.target import Target


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


Replacement = Callable[[Attention, Moment], Tensor | None]
"""Gives the attention of a call with several tokens, or None to leave it to the model."""


class AttentionWatch:
    """Shows attention rows to those who asked, and computes attention where something else decides what is seen.

    Attributes:
        owns_cache: Whether the layers of the caches in use are ours.
        watchers: Who sees rows.
        queries_kept: How many of the latest queries of each layer are kept.
        windows: Sliding window of each layer; None where it sees everything.
        keeps_decoding_queries: Whether those of generated tokens are kept, too.
        replacement: Computes attention `[batch query head d_value]` in calls with several tokens, unless it gives None.
            It is called with the attention, whose `view` is known, and the call.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.owns_cache = False
        self.watchers: list[Watcher] = []
        self.replacement: Replacement | None = None
        self.queries_kept = 0
        self.keeps_decoding_queries = False
        self.windows = [layer_window(target, layer) for layer in range(target.n_layers)]

    @property
    def is_seen(self) -> bool:
        """Whether anybody sees the rows of attention, or replaces what is computed from them."""
        return bool(self.watchers) or self.replacement is not None

    def handler(self, moment: Moment, configs: frozenset[int]) -> Handler:
        """Return what handles the attention of a call; `configs` are the ids of the configurations of the model.

        It is idle if the model can compute the attention alone, in less time.
        """
        own_masks = is_ragged = False
        for kv in moment.layers:  # a plain loop: every token comes here
            if kv.slot_positions is not None:
                own_masks = True
            if self.windows[kv.number] is not None or not kv.gapless:
                is_ragged = True
        idle = not self.watchers and not self.keeps_decoding_queries
        if moment.call.new > 1 or moment.state.prefilling or (own_masks and is_ragged):
            idle = False
        layers = dict[int, CacheLayer]()
        if not idle:
            for number, kv in enumerate(getattr(moment.cache, "layers", ())):
                if isinstance(kv, CacheLayer):
                    layers[number] = kv
        see = partial(self.see, moment, layers, own_masks)
        return Handler(see, configs, replaces_mask=own_masks, idle=idle)

    def see(self, moment: Moment, layers: dict[int, CacheLayer], own_masks: bool, attention: Attention) -> None:
        """Handle the attention of one layer in one call: decide what computes it and who sees its rows.

        Args:
            moment: The call.
            layers: The layers of its cache that are `CacheLayer`s, by number.
            own_masks: Whether our masks replace the model's own, because some layer does not hold all tokens so far.
            attention: The attention.
        """
        layer = attention.layer
        queries = attention.queries
        kv = layers.get(layer)
        sees_all = kv is not None and kv.gapless and self.windows[layer] is None
        if queries > 1 or not sees_all:  # else the only query certainly sees every slot
            attention.viewed = partial(self._view_of, moment, kv)
        if self.queries_kept and not attention.is_repeated:
            self._note_queries(moment, attention)
        if queries > 1 and self.owns_cache and not own_masks:
            self._check_view(sees_all, attention)
        if own_masks or (self.replacement is not None and queries > 1):
            attention.mask_is_stale = own_masks
            attention.compute = partial(self._compute, moment, own_masks)
        for watcher in self.watchers:
            if watcher.layers is None or layer in watcher.layers:
                first = 0 if watcher.last is None else max(0, queries - watcher.last)
                attention.show(partial(self._show_rows, watcher, moment, kv, attention), first=first)

    def _check_view(self, sees_all: bool, attention: Attention) -> None:
        """Refuse a layer whose last query sees other keys than our masks will show it.

        Args:
            sees_all: Whether they show it every slot.
            attention: The attention of the layer.

        Raises:
            UnsupportedError: It does.
        """
        shown = attention.shown_to_last()
        if shown is None and sees_all:
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

    def _show_rows(
        self, watcher: Watcher, moment: Moment, kv: CacheLayer | None, attention: Attention, first: int, probs: Tensor
    ) -> None:
        pos = slot_positions(moment.call, attention) if kv is None else kv.pos
        watcher.fn(AttentionRows(attention.layer, first, probs, pos, kv, moment.call))

    def _compute(self, moment: Moment, own_masks: bool, attention: Attention) -> tuple[Tensor, Tensor | None] | None:
        """Compute a prompt's attention by a replacement, or attention to the rest of a cache; None for stock."""
        if self.replacement is not None and attention.queries > 1:
            replaced = self.replacement(attention, moment)
            if replaced is not None:
                return replaced, None
        if not own_masks:
            return None
        return attention.under_view(), None

    def _view_of(self, moment: Moment, kv: CacheLayer | None, attention: Attention) -> View:
        """What the queries of this call see."""
        pos = slot_positions(moment.call, attention) if kv is None else kv.pos
        return View(pos, moment.call.on(attention.key.device), self.windows[attention.layer])

    def _note_queries(self, moment: Moment, attention: Attention) -> None:
        """Keep the latest queries of a layer."""
        state, layer = moment.state, attention.layer
        if moment.call.new > 1 or state.prefilling or self.keeps_decoding_queries:
            earlier = state.queries.get(layer)
            latest = LatestQueries.of(attention, moment.call, self.windows[layer], earlier, self.queries_kept)
            state.queries[layer] = latest


def slot_positions(call: Call, attention: Attention) -> Int[Tensor, "batch kv_head slot"]:
    """Return the true position of each slot of a cache that is not ours, where it is a column."""
    key = attention.key
    columns = call.columns[:, -key.shape[2] :].to(key.device)
    # "batch slot -> batch kv_head slot" as a view: masks are then computed once for all heads.
    return columns[:, None].expand(key.shape[:3])
