"""The attention of one layer in one forward call, as handlers see it and may replace it.

`visible` says which keys the queries see, `attention_probs` computes attention rows with all that an architecture does
to its scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from einops import repeat
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sinkscope.engine.stock import Stock, eager_attention
from sinkscope.engine.visible import Columns, Hidden, MaskSource, Visible, additive, shown
from sinkscope.errors import UnsupportedError
from sinkscope.models.grouped_heads import by_query_head, fold_groups_into_queries, per_query_head
from sinkscope.models.hooks import without_autocast

Rows = Float[Tensor, "batch head query key"]


def attention_probs(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    mask: Shaped[Tensor, "#batch #head query key"] | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " head"] | None = None,
) -> Rows:
    """Return the softmax of scaled scores for some rows, in float32.

    Args:
        query: Queries after rotary.
        key: Keys after rotary, one per kv head; query heads share them in groups.
        mask: True where a key may be seen, or numbers that are added to the scores. None means everywhere.
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
    if mask is not None and mask.is_floating_point():
        hidden = ~shown(mask)  # the smallest number of half precision is not small enough beside a soft cap
        scores = (scores + mask.float()).masked_fill_(hidden, torch.finfo(torch.float32).min)
    elif mask is not None:
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
        recomputed = own.attention(module, query, key[:1], value[:1], None, scaling=scaling, dropout=0.0)[0]
        own.agrees = relative_error(recomputed.transpose(1, 2).float(), right) < _TOLERATED
    if not own.agrees:
        raise UnsupportedError(
            f"attention is a function of your own, registered as {own.name!r}, and its output is not softmax(q k) "
            "v, so that it cannot be recomputed for some keys or queries: load the model with "
            "attn_implementation='sdpa', or put back what transformers has by that name"
        )


class _RowRange(NamedTuple):
    """Which rows a listener asked for: from which query on, how many at a time if it says so."""

    first: int
    chunk: int | None
    gives_output: bool


@dataclass(eq=False)
class Attention:
    """The attention of one layer in one forward call.

    Attributes:
        module: The layer's attention module.
        layer: Number of the decoder layer.
        query: Queries after rotary.
        key: Keys after rotary, of everything in the layer's cache.
        value: Values of everything in the layer's cache.
        mask: The model's mask, in the form that its attention takes. None means causal, or that tokens are missing in
            the cache, so that no mask of the model's would be right.
        source: Says who sees whom, by column.
        first_query: Column of the first query.
        queries: Number of queries in this call.
        settings: Everything else that the model passes: "scaling", "softcap", "s_aux" and so on.
        own: What the model selects by itself.
        scaling: Factor on the scores.
        softcap: The soft cap of the model's own attention.
        sinks: The learned sink logits of the model's own attention.
        slots_of: Gives the columns of the keys, where they are not simply those from `first_key` on.
        first_key: Column of the first key.
        lacks_keys: Whether keys of earlier tokens are missing.
        is_whole: Whether the only query certainly sees every key, so that no mask is needed.
        compute: Replaces the model's own attention unless it returns None.
        hidden: What hides keys beside the model.
        is_repeated: Whether the module attends with the same queries and keys as just before, to other values
            (DiffLlama).
    """

    module: Any
    layer: int
    query: Float[Tensor, "batch head query d_head"]
    key: Float[Tensor, "batch kv_head key d_head"]
    value: Float[Tensor, "batch kv_head key d_value"]
    mask: Any
    source: MaskSource
    first_query: int
    queries: int
    settings: dict[str, Any]
    own: Stock
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    slots_of: Callable[[], Int[Tensor, "batch _ key"]] | None = None
    first_key: int = 0
    lacks_keys: bool = False
    is_whole: bool = False
    compute: Callable[[Attention], AttentionOutput | None] | None = None
    is_repeated: bool = False
    hidden: list[Hidden] = field(default_factory=list)
    _listeners: dict[_RowRange, list[RowsFunction]] = field(default_factory=dict)

    @cached_property
    def slots(self) -> Int[Tensor, "batch _ key"] | None:
        """Columns of the keys; None where they are those from `first_key` on."""
        return None if self.slots_of is None else self.slots_of()

    @property
    def visible(self) -> Visible:
        """Which keys each query sees."""
        batch, keys = len(self.query), self.key.shape[2]
        columns: Columns = range(self.first_key, self.first_key + keys)
        if self.slots is not None:
            columns = self.slots
        query = range(self.first_query, self.first_query + self.queries)
        return Visible(self.source, query, columns, batch, self.key.device, tuple(self.hidden))

    @property
    def is_edited(self) -> bool:
        """Whether the model's own mask does not say what is seen: keys are missing, or more are hidden."""
        return bool(self.hidden) or (self.slots_of is not None and not self.is_whole)

    def hide(self, hidden: Hidden) -> None:
        """Hide cells from now on, beside what the model hides."""
        self.hidden.append(hidden)
        self.is_whole = False

    def probs_function(self) -> Callable[[Tensor, Tensor, Tensor | None], Rows]:
        """Return `attention_probs` of any queries and keys of this layer under a mask, which does not hold these."""
        return partial(attention_probs, scaling=self.scaling, softcap=self.softcap, sinks=self.sinks)

    def show(self, fn: RowsFunction, *, first: int = 0, chunk: int | None = None, gives_output: bool = True) -> None:
        """Show rows to `fn`, one chunk of queries at a time.

        Args:
            fn: Called with the index of the first query, and rows.
            first: Index of the first query to show.
            chunk: Number of queries at a time; None for what is fast.
            gives_output: Whether the output of a single query may be made of its row, so that it is computed once.
        """
        if self.is_repeated:  # these rows were shown just before
            return
        self._listeners.setdefault(_RowRange(first, chunk, gives_output), []).append(fn)

    def show_visible(self, observer: VisibleRowObserver, *, first: int, chunk: int) -> None:
        """Show rows to `observer(layer, first_query, rows, visible)`, with the keys that are seen."""

        def tell(begin: int, rows: Tensor) -> None:
            sees = self.visible.section(slice(begin, begin + rows.shape[2])).sees()
            observer(self.layer, begin, rows, sees.any(1, keepdim=True))

        self.show(tell, first=first, chunk=chunk, gives_output=False)

    def stock(self, mask: Any) -> AttentionOutput:
        """Return the model's own attention under a mask of the model's own kind."""
        return self._by(self.own.attention, self.query, mask)

    def under_visible(self) -> Float[Tensor, "batch query head d_value"]:
        """Return the model's own attention over what is visible."""
        if self.is_whole:
            return self.stock(None)[0]
        check_recomputed(self.own, self.module, self.query, self.key, self.value, self.scaling)
        # Only eager attention applies soft caps and learned sink logits; under SDPA the model runs without them.
        is_eager = self.softcap is not None or self.sinks is not None or self.own.kind == "eager"
        own = eager_attention if is_eager else sdpa_attention_forward
        outputs = list[Tensor]()
        for start in range(0, self.queries, _MASKED_CHUNK):
            part = slice(start, start + _MASKED_CHUNK)
            query = self.query[:, :, part]
            mask = self.visible.section(part).mask_by_head(query.shape[1])
            if is_eager or mask.is_floating_point():
                mask = additive(mask, query.dtype)
            outputs.append(self._by(own, query, mask)[0])
        return torch.cat(outputs, 1)

    def recomputed(self) -> AttentionOutput:
        """Return the output that `attention_probs` gives."""
        return torch.cat([self._weighted(self._rows(part)) for part in self._parts(_RowRange(0, None, False))], 1), None

    def finish(self) -> AttentionOutput:
        """Return the output `[batch query head d_value]`, and weights if there are any; shows rows to handlers."""
        if not self._listeners and self.compute is None and not self.is_edited:
            return self.stock(self.mask)
        attended: AttentionOutput | None = None
        if self.queries == 1:
            rows: Tensor | None = None
            for rows_range in list(self._listeners):
                if rows_range.gives_output:
                    if rows is None:
                        rows = self._rows(slice(0, 1))
                    for fn in self._listeners.pop(rows_range):
                        fn(0, rows)
            if rows is not None:  # they were built anyway: the output comes from them
                attended = self._weighted(rows), rows
        if attended is None and self.compute is not None:
            attended = self.compute(self)
        if attended is None:
            attended = (self.under_visible(), None) if self.is_edited else self.stock(self.mask)
        for rows_range, listeners in self._listeners.items():
            for part in self._parts(rows_range):
                rows = self._rows(part)
                for fn in listeners:
                    fn(part.start, rows)
        self._listeners.clear()  # they hold this object, and it holds queries, keys and values
        return attended

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

    def _by(self, own: Callable[..., Any], query: Tensor, mask: Any) -> AttentionOutput:
        return own(self.module, query, self.key, self.value, mask, **self.settings)

    def _weighted(self, rows: Tensor) -> Tensor:
        """The values, weighted by attention rows."""
        batch, heads, _, keys = rows.shape
        kv_heads = self.value.shape[1]
        probs = fold_groups_into_queries(rows.to(self.value.dtype), kv_heads)
        output = torch.bmm(probs, self.value.reshape(batch * kv_heads, keys, -1))
        return by_query_head(output, batch, heads).transpose(1, 2).contiguous()

    def _rows(self, part: slice) -> Rows:
        query, key, mask, later = self.query[:, :, part], self.key, None, 0
        if not self.is_whole:
            visible = self.visible
            is_causal = visible.is_causal
            if is_causal:
                later = self.queries - part.stop  # new tokens that none of these queries sees
            if not is_causal or self.queries > 1:
                earlier = slice(0, key.shape[2] - later)
                key = key[:, :, earlier]
                mask = visible.section(part, earlier).mask_by_head(query.shape[1])
        rows = attention_probs(query, key, mask, scaling=self.scaling, softcap=self.softcap, sinks=self.sinks)
        return torch.nn.functional.pad(rows, (0, later)) if later else rows
