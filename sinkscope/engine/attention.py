"""The attention of one layer in one forward call, as handlers see it and may replace it.

`View` says which keys the queries see, `attention_probs` computes attention rows with all that an architecture does to
its scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from einops import repeat
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sinkscope.engine.stock import Stock, eager_attention
from sinkscope.errors import UnsupportedError
from sinkscope.models.grouped_heads import by_query_head, fold_groups_into_queries, per_query_head
from sinkscope.models.hooks import without_autocast


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


Rows = Float[Tensor, "batch head query key"]


def shown(mask: Tensor) -> Bool[Tensor, "*shape"]:
    """Return where a mask of either kind, bool or additive, shows a key."""
    if mask.is_floating_point():
        return mask > torch.finfo(mask.dtype).min / 2
    return mask


def additive(mask: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Return a mask that eager attention adds to its scores."""
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return added.masked_fill_(~mask, torch.finfo(dtype).min)


def attention_probs(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    mask: Bool[Tensor, "#batch #head query key"] | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " head"] | None = None,
) -> Rows:
    """Return the softmax of scaled scores for some rows, in float32.

    Args:
        query: Queries after rotary.
        key: Keys after rotary, one per kv head; query heads share them in groups.
        mask: True where a key may be seen. None means everywhere.
        scaling: Factor on the scores.
        softcap: `cap * tanh(score / cap)` (Gemma 2).
        sinks: A learned logit per head that takes part in the softmax and is then dropped (gpt-oss).
    """
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1:3]
    grouped = query.reshape(batch * kv_heads, -1, width)
    shared = key.reshape(batch * kv_heads, keys, width).mT
    is_half = query.is_cuda and query.dtype == key.dtype and query.dtype.itemsize == 2
    with without_autocast(query.device):
        if is_half and torch.version.hip is None and not torch.is_grad_enabled():
            scores = torch.bmm(grouped, shared, out_dtype=torch.float32)  # by tensor cores
        else:
            scores = torch.bmm(grouped.float(), shared.float())
    scores = scores.reshape(batch, heads, queries, keys).mul_(scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores.masked_fill_(~mask, torch.finfo(torch.float32).min)
    if sinks is None:
        return torch.softmax(scores, -1)
    sink_scores = repeat(sinks.float(), "head -> batch head query 1", batch=batch, query=queries)
    return torch.softmax(torch.cat([scores, sink_scores], -1), -1)[..., :-1]


_CHUNK = 256  # queries whose rows are built at a time at most, if a handler does not say another number
_CELLS = {"cpu": 2**21}  # of these rows: where they take more, each chunk is memory that is new, which takes time
_CELLS_ELSEWHERE = 2**26
_TOLERATED = 0.02  # difference of a function of the user's own, of its size; in float16 it is a thousandth
_MASKED_CHUNK = 1024  # queries at a time where a mask has to be built

AttentionOutput = tuple[Tensor, Tensor | None]
"""What attention gives, `[batch query head d_value]`, and its rows if it has them."""
VisibleRowObserver = Callable[[int, int, Tensor, Tensor], None]
RowsFunction = Callable[[int, Tensor], None]
"""Called with the number of the first query and rows `[batch head query key]`."""


def relative_error(change: Tensor, expected: Tensor, numbers: Tensor | None = None) -> float:
    """Return the largest distance from the expected change, relative to its size or, if larger, that of `numbers`."""
    size = expected.abs().max()
    if not size > 0:
        return float("inf")
    if numbers is not None:
        size = torch.maximum(size, numbers.abs().max())
    return float(((change - expected).abs().max() / size).nan_to_num(torch.inf))


def check_recomputed(own: Stock, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
    """Refuse a function of the user's own whose output for the last query is not what sinkscope recomputes.

    Args:
        own: What the model selects by itself.
        module: An attention module.
        query: `[batch head query d_head]`, after rotary.
        key: `[batch kv_head key d_head]`.
        value: `[batch kv_head key d_value]`.
        scaling: Factor on the scores.

    Raises:
        UnsupportedError: It is not.
    """
    if own.agrees is None:
        query = query[:1, :, -1:]  # which sees every key, with a mask or without
        rows = attention_probs(query, key[:1], None, scaling=scaling)
        right = rows @ per_query_head(value[:1], rows.shape[1]).float()
        given = own.function(module)(module, query, key[:1], value[:1], None, scaling=scaling, dropout=0.0)[0]
        own.agrees = relative_error(given.transpose(1, 2).float(), right) < _TOLERATED
    if not own.agrees:
        raise UnsupportedError(
            f"attention is a function of your own, registered as {own.name!r}, and its output is not softmax(q k) "
            "v, so that it cannot be recomputed for some keys or queries: load the model with "
            "attn_implementation='sdpa', or put back what transformers has by that name"
        )


class _RowRange(NamedTuple):
    """Which rows a listener asked for: from which query on, how many at a time if it says so, by mask or by view."""

    first: int
    chunk: int | None
    needs_mask: bool


@dataclass(eq=False)
class Attention:
    """The attention of one layer in one forward call.

    Attributes:
        module: The layer's attention module.
        layer: Number of the decoder layer.
        query: Queries after rotary.
        key: Keys after rotary, of everything in the layer's cache.
        value: Values of everything in the layer's cache.
        mask: The model's mask, in the form that its attention takes. None means causal, or that a handler determines
            what is seen.
        settings: Everything else that the model passes: "scaling", "softcap", "s_aux" and so on.
        own: What the model selects by itself.
        scaling: Factor on the scores.
        softcap: The soft cap of the model's own attention.
        sinks: The learned sink logits of the model's own attention.
        needs_mask: Whether some handler needs rows under the mask.
        viewed: Says what is seen, by true positions, if a handler knows it; None if the only query sees every key, so
            that no mask is needed.
        mask_is_stale: Whether `view` differs from the mask because tokens are missing in the cache.
        compute: Replaces the model's own attention unless it returns None.
        is_repeated: Whether the module attends with the same queries and keys as just before, to other values
            (DiffLlama).
    """

    module: Any
    layer: int
    query: Float[Tensor, "batch head query d_head"]
    key: Float[Tensor, "batch kv_head key d_head"]
    value: Float[Tensor, "batch kv_head key d_value"]
    mask: Any
    settings: dict[str, Any]
    own: Stock
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    needs_mask: bool = False
    viewed: Callable[[Attention], View | None] | None = None
    mask_is_stale: bool = False
    compute: Callable[[Attention], AttentionOutput | None] | None = None
    is_repeated: bool = False
    _listeners: dict[_RowRange, list[RowsFunction]] = field(default_factory=dict)

    @cached_property
    def queries(self) -> int:
        """Number of queries in this call."""
        return self.query.shape[2]

    @cached_property
    def view(self) -> View | None:
        """What is seen, by true positions, if a handler knows it; None if that is everything."""
        if self.viewed is None:
            return None
        return self.viewed(self)

    def shown_to_last(self) -> Bool[Tensor, "batch 1 1 key"] | None:
        """Return the keys that the model's mask shows to the last query in every head; None if there is no mask."""
        if self.mask is None and "flash" not in self.own.kind:
            return None
        return shown(self.mask_of(slice(self.queries - 1, self.queries))).all(1, keepdim=True)

    def mask_of(self, part: slice) -> Shaped[Tensor, "batch _ query key"]:
        """Return the model's mask, bool or additive, for some of the queries, whatever form its attention takes."""
        keys, mask = self.key.shape[2], self.mask
        if isinstance(mask, Tensor) and mask.ndim == 4:
            return mask[:, :, part, :keys]
        key = torch.arange(keys, device=self.key.device)
        first = keys - self.queries
        query = torch.arange(self.queries, device=self.key.device)[part, None]
        mask_mod: Any = getattr(mask, "mask_mod", None)
        if mask_mod is not None:  # of a BlockMask, which FlexAttention takes
            row = torch.arange(len(self.key), device=self.key.device)[:, None, None, None]
            sees = mask_mod(row, torch.zeros_like(row), query, key)
            return sees.expand(len(self.key), 1, -1, -1)
        sees = key <= first + query
        window = self.settings.get("sliding_window")
        if window and (mask is not None or "flash" in self.own.kind):  # it is told of padding alone
            sees &= key > first + query - window
        sees = sees.expand(len(self.key), 1, -1, -1)
        if mask is None:
            return sees
        return sees & mask[:, None, None, :keys].bool()

    def probs_function(self) -> Callable[[Tensor, Tensor, Tensor | None], Rows]:
        """Return `attention_probs` of any queries and keys of this layer under a mask, which does not hold these."""
        return partial(attention_probs, scaling=self.scaling, softcap=self.softcap, sinks=self.sinks)

    def show(self, fn: RowsFunction, *, needs_mask: bool = False, first: int = 0, chunk: int | None = None) -> None:
        """Show rows to `fn`, one chunk of queries at a time.

        Args:
            fn: Called with the index of the first query, and rows.
            needs_mask: Compute rows under the mask; otherwise by `view`. If tokens were evicted, always by `view`.
            first: Index of the first query to show.
            chunk: Number of queries at a time; None for what is fast.
        """
        if self.is_repeated:  # these rows were shown just before
            return
        rows = _RowRange(first, chunk, needs_mask and not self.mask_is_stale)
        self._listeners.setdefault(rows, []).append(fn)

    def show_visible(self, observer: VisibleRowObserver, *, first: int, chunk: int) -> None:
        """Show rows under the mask to `observer(layer, first_query, rows, visible)`, with the keys that it shows."""

        def tell(begin: int, rows: Tensor) -> None:
            mask = self.mask_of(slice(begin, begin + rows.shape[2]))
            observer(self.layer, begin, rows, shown(mask).any(1, keepdim=True))

        self.show(tell, needs_mask=True, first=first, chunk=chunk)

    def stock(self, mask: Tensor | None) -> AttentionOutput:
        """Return the model's own attention under a mask of the model's own kind."""
        return self._by(self.own.function(self.module), self.query, mask)

    def under_view(self) -> Float[Tensor, "batch query head d_value"]:
        """Return the model's own attention over what `view` shows."""
        if self.view is None:
            return self.stock(None)[0]
        check_recomputed(self.own, self.module, self.query, self.key, self.value, self.scaling)
        # Only eager attention applies soft caps and learned sink logits; under SDPA the model runs without them.
        is_eager = self.softcap is not None or self.sinks is not None or self.own.kind == "eager"
        own = eager_attention(self.module) if is_eager else sdpa_attention_forward
        outputs = list[Tensor]()
        for start in range(0, self.queries, _MASKED_CHUNK):
            part = slice(start, start + _MASKED_CHUNK)
            query = self.query[:, :, part]
            mask = self.view.section(part, slice(None)).sees_by_head(query.shape[1])
            if is_eager:
                mask = additive(mask, query.dtype)
            outputs.append(self._by(own, query, mask)[0])
        return torch.cat(outputs, 1)

    def finish(self) -> AttentionOutput:
        """Return the output `[batch query head d_value]`, and weights if there are any; shows rows to handlers."""
        if not self._listeners and self.compute is None and not self.needs_mask:
            return self.stock(self.mask)
        output, weights = self._attended()
        for rows_range, listeners in self._listeners.items():
            for part in self._parts(rows_range):
                rows = self._rows(part, rows_range.needs_mask)
                for fn in listeners:
                    fn(part.start, rows)
        self._listeners.clear()  # they hold this object, and it holds queries, keys and values
        return output, weights

    def _attended(self) -> AttentionOutput:
        """Output and weights; a single query's output is made of its rows, if somebody asked for them."""
        if self.queries == 1:
            rows: Tensor | None = None
            for rows_range in list(self._listeners):
                if not rows_range.needs_mask:
                    if rows is None:
                        rows = self._rows(slice(0, 1), False)
                    for fn in self._listeners.pop(rows_range):
                        fn(0, rows)
            if rows is not None:  # they were built anyway: the output comes from them
                return self._weighted(rows), rows
        if self.compute is not None:
            replaced = self.compute(self)
            if replaced is not None:
                return replaced
        if not self.needs_mask:
            return self.stock(self.mask)
        if self.softcap is None and self.sinks is None:
            return self._by(sdpa_attention_forward, self.query, self.mask)[0], None
        parts = self._parts(_RowRange(0, None, True))
        return torch.cat([self._weighted(self._rows(part, True)) for part in parts], 1), None

    def _parts(self, rows: _RowRange) -> list[slice]:
        """The queries whose rows are built at a time."""
        chunk = rows.chunk
        if chunk is None:
            batch, heads = self.query.shape[:2]
            cells = _CELLS.get(self.query.device.type, _CELLS_ELSEWHERE)
            chunk = min(_CHUNK, max(16, cells // (batch * heads * self.key.shape[2])))
        parts = list[slice]()
        for start in range(rows.first, self.queries, chunk):
            parts.append(slice(start, min(start + chunk, self.queries)))
        return parts

    def _by(self, own: Callable[..., Any], query: Tensor, mask: Tensor | None) -> AttentionOutput:
        return own(self.module, query, self.key, self.value, mask, **self.settings)

    def _weighted(self, rows: Tensor) -> Tensor:
        """The values, weighted by attention rows."""
        batch, heads, _, keys = rows.shape
        kv_heads = self.value.shape[1]
        probs = fold_groups_into_queries(rows.to(self.value.dtype), kv_heads)
        output = torch.bmm(probs, self.value.reshape(batch * kv_heads, keys, -1))
        return by_query_head(output, batch, heads).transpose(1, 2).contiguous()

    def _rows(self, part: slice, needs_mask: bool) -> Rows:
        query, key, probs = self.query[:, :, part], self.key, self.probs_function()
        if needs_mask:
            return probs(query, key, self.mask_of(part))
        if self.viewed is None or self.view is None:
            return probs(query, key, None)
        later = self.queries - part.stop  # new tokens that none of these queries sees
        earlier = slice(0, key.shape[2] - later)
        mask = self.view.section(part, earlier).sees_by_head(query.shape[1])
        return torch.nn.functional.pad(probs(query, key[:, :, earlier], mask), (0, later))
