"""The attention tap: the single attention function and mask function that tapped models use.

Handlers are injected. They see the attention of every layer as the model computes it, may replace it, and may request
its rows. If no handler acts, the model's own attention runs with the model's own mask, so the result equals the stock
one bit for bit (under a cache policy, up to rounding where a sliding window would have dropped keys). The tap does not
know who listens, so measurements work under cache policies and guards.

Measurements listen through `attention_rows`. No full query x key matrix is stored: an observer
sees `rows_per_chunk` rows at a time. The rows include everything the architecture does to its scores: soft cap, window,
padding, learned sink logits. Under a cache policy they cover the keys that the cache keeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import ref

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.models.target import Target, on_output
from sinkscope.models.uncompiled import uncompiled
from sinkscope.trace.internals import attention_name, eager_attention, sdpa_attention, set_attention
from sinkscope.trace.own import Parts, bias_at, reading

NAME = "sinkscope"
CHUNK = 256
"""Queries whose rows are built at a time, if a handler does not say another number."""
_MASKED_CHUNK = 1024  # queries at a time where a mask has to be built

Output = tuple[Tensor, Tensor | None]
"""What attention gives, `[batch query head d_value]`, and its rows if it has them."""
Rows = Float[Tensor, "batch head query key"]
RowsFunction = Callable[[int, Tensor], None]
"""Called with the number of the first query and rows `[batch head query key]`."""


class ChunkWindow(int):
    """A window that ends where the query's chunk of this many tokens begins (Llama 4)."""


@dataclass(frozen=True, eq=False)
class View:
    """Which keys the queries of a call see, by true positions.

    Attributes:
        pos: Position of each key; -1 where there is none.
        query_pos: Position of each query; -1 at padding.
        window: Keys this far back and further are not seen. None means all are seen.
        hidden: Cached keys that are not attended to. None means none.
        columns: Positions of all tokens so far, evicted or not; -1 at padding.
        chosen: Positions that an indexer chose for each query, and one more place; None if it is not asked.
    """

    pos: Int[Tensor, "batch kv_head key"]
    query_pos: Int[Tensor, "batch query"]
    window: int | None = None
    hidden: Bool[Tensor, "batch kv_head key"] | None = None
    columns: Int[Tensor, "batch column"] | None = None
    chosen: Bool[Tensor, "batch _ query position"] | None = None

    def part(self, queries: slice, keys: slice) -> View:
        """Some of the queries and keys."""
        hidden = None
        if self.hidden is not None:
            hidden = self.hidden[..., keys]
        chosen = None
        if self.chosen is not None:
            chosen = self.chosen[:, :, queries]
        return replace(
            self,
            pos=self.pos[..., keys],
            query_pos=self.query_pos[:, queries],
            hidden=hidden,
            chosen=chosen,
        )

    def sees(self) -> Bool[Tensor, "batch _ query key"]:
        """Keys that hold a token, are not later than the query, and are inside the window.

        Padding queries see none; their output is never read.
        """
        pos = self.pos
        if self.hidden is None and pos.stride(1) == 0:  # the same in every head
            pos = pos[:, :1]
        # By indexing, because this runs for every generated token, where einops takes a tenth of the time.
        key = pos[:, :, None, :]  # "batch kv_head key -> batch kv_head 1 key"
        query = self.query_pos[:, None, :, None]  # "batch query -> batch 1 query 1"
        visible = (key <= query) & (key >= 0)
        if self.window is not None:
            visible = visible & (key > query - self.window)
        if isinstance(self.window, ChunkWindow):
            visible = visible & (key // self.window == query // self.window)
        if self.chosen is not None:
            place = pos[:, :1, None].clamp(min=0).expand(-1, *self.chosen.shape[1:3], -1)
            visible = visible & self.chosen.gather(-1, place)
        if self.hidden is None:
            return visible
        return visible & ~rearrange(self.hidden, "batch kv_head key -> batch kv_head 1 key")


@dataclass(frozen=True, eq=False)
class Handler:
    """A listener at the tap.

    Attributes:
        see: Called with the attention of every layer.
        configs: Ids of the configurations of the model it listens to.
        by_mask: Whether it needs rows under the model's mask, so that the mask must be complete (SDPA's).
        masks: Whether it determines what is seen, so that no mask is needed.
        idle: Whether it has nothing to do unless others listen too. The model then computes attention alone.
        ended: Set when it listens no more, for threads whose call was interrupted, in which nothing could remove it.
    """

    see: Callable[[Attention], None]
    configs: frozenset[int]
    by_mask: bool = False
    masks: bool = False
    idle: bool = False
    ended: threading.Event = field(default_factory=threading.Event)


class _RowRange(NamedTuple):
    """Which rows a listener asked for: from which query on, how many at a time, by mask or by view."""

    first: int
    chunk: int
    by_mask: bool

    def parts(self, queries: int) -> list[slice]:
        """The chunks of a call with this many queries."""
        starts = range(self.first, queries, self.chunk)
        return [slice(start, min(start + self.chunk, queries)) for start in starts]


@dataclass(eq=False)
class Attention:
    """The attention of one layer in one forward call.

    Attributes:
        module: The layer's attention module.
        query: Queries after rotary.
        key: Keys after rotary, of everything in the layer's cache.
        value: Values of everything in the layer's cache.
        mask: The model's mask. None means causal, or that a handler determines what is seen.
        settings: Everything else that the model passes: "scaling", "softcap", "s_aux" and so on.
        by_mask: Whether some handler needs rows under the mask.
        view: What is seen, by true positions, if a handler knows it.
        complete: Whether a handler knows that the only query sees every key, so that no mask is needed.
        evicted: Whether `view` differs from the mask because tokens are missing in the cache.
        compute: Replaces the model's own attention unless it returns None.
        indices: Slots that an indexer chose for each query, in its own layer; None if there is no indexer.
        in_blocks: Keys in the blocks that an indexer chose; None if it does not choose blocks.
        is_again: Whether the module attends with the same queries and keys as just before, to other values (DiffLlama).
    """

    module: Any
    query: Float[Tensor, "batch head query d_head"]
    key: Float[Tensor, "batch kv_head key d_head"]
    value: Float[Tensor, "batch kv_head key d_value"]
    mask: Tensor | None
    settings: dict[str, Any]
    by_mask: bool = False
    view: View | None = None
    complete: bool = False
    evicted: bool = False
    compute: Callable[[Attention], Output | None] | None = None
    indices: Int[Tensor, "batch query chosen"] | None = None
    in_blocks: Bool[Tensor, "batch head query key"] | None = None
    is_again: bool = False
    _listeners: dict[_RowRange, list[RowsFunction]] = field(default_factory=dict)

    @property
    def layer(self) -> int:
        """Number of the decoder layer."""
        return int(self.module.layer_idx)

    @property
    def queries(self) -> int:
        """Number of queries in this call."""
        return self.query.shape[2]

    @property
    def scaling(self) -> float:
        """Factor on the scores."""
        return _scaling(self.module, self.query, self.settings.get("scaling"))

    @property
    def softcap(self) -> float | None:
        """The soft cap of the model's own attention."""
        return self._of_own("softcap")

    @property
    def sinks(self) -> Tensor | None:
        """The learned sink logits of the model's own attention."""
        return self._of_own("s_aux")

    def _of_own(self, name: str) -> Any:
        """A setting that eager attention follows; SDPA, if selected, drops it (or refuses to run)."""
        value = self.settings.get(name)
        if value is None or stock_name(self.module.config) == "sdpa":
            return None
        return value

    @property
    def _needs_eager(self) -> bool:
        """Whether the model's own attention does what SDPA does not."""
        return self.softcap is not None or self.sinks is not None

    @property
    def is_eager(self) -> bool:
        """Whether the model's own attention builds the whole matrix of rows."""
        return stock_name(self.module.config) == "eager"

    @property
    def is_biased(self) -> bool:
        """Whether the scores are more than products of queries and keys."""
        return False

    def shown_to_last(self) -> Bool[Tensor, "batch 1 1 key"] | None:
        """The keys that the model's mask shows to the last query in every head; None if there is no mask."""
        if self.mask is None:
            return None
        return shown(self.mask[:, :, self.queries - 1 : self.queries, : self.key.shape[2]]).all(1, keepdim=True)

    def visible(self, part: slice) -> Bool[Tensor, "batch 1 query key"]:
        """The keys that the model's mask shows to some of the queries in any head."""
        keys = self.key.shape[2]
        if self.mask is not None:
            return shown(self.mask[:, :, part, :keys]).any(1, keepdim=True)
        first = keys - self.queries
        query = torch.arange(first, keys, device=self.key.device)[part]
        sees = torch.arange(keys, device=self.key.device) <= rearrange(query, "query -> query 1")
        return sees.expand(len(self.key), 1, -1, -1)

    def row_function(self) -> Callable[[Tensor, Tensor, View], Tensor]:
        """A function that gives rows of any queries and keys of this layer by a view, and does not hold these."""
        module, scaling = self.module, self.scaling
        return lambda query, key, view: rows_by_view(module, query, key, view, scaling)

    def show(self, fn: RowsFunction, *, by_mask: bool = False, first: int = 0, chunk: int = CHUNK) -> None:
        """Show rows to `fn`, one chunk of queries at a time.

        Args:
            fn: Called with the index of the first query, and rows.
            by_mask: Compute rows under the mask; otherwise by `view`. If tokens were evicted, always by `view`.
            first: Index of the first query to show.
            chunk: Number of queries at a time.
        """
        if self.is_again:  # these rows were shown just before
            return
        rows = _RowRange(first, chunk, by_mask and not self.evicted)
        self._listeners.setdefault(rows, []).append(fn)

    def stock(self, mask: Tensor | None) -> Output:
        """The model's own attention under a mask of the model's own kind."""
        return self._by(_stock_attention(self.module), self.query, mask)

    def under_view(self) -> Float[Tensor, "batch query head d_value"]:
        """The model's own attention over what `view` shows."""
        assert self.view is not None
        # Eager is the one that knows soft caps and learned sink logits; where SDPA was chosen, the model goes without.
        is_eager = self.is_eager or self._needs_eager
        if is_eager:
            own = eager_attention(self.module)
        else:
            own = sdpa_attention()
        outputs = list[Tensor]()
        for start in range(0, self.queries, _MASKED_CHUNK):
            part = slice(start, start + _MASKED_CHUNK)
            query = self.query[:, :, part]
            mask = widened(self.view.part(part, slice(None)).sees(), query.shape[1])
            if is_eager:
                mask = _additive(mask, query.dtype)
            outputs.append(self._by(own, query, mask)[0])
        return torch.cat(outputs, 1)

    def finish(self) -> Output:
        """The output `[batch query head d_value]`, and weights if there are any; shows rows to handlers."""
        output, weights = self._attended()
        for rows_range, listeners in self._listeners.items():
            for part in rows_range.parts(self.queries):
                _tell(listeners, part.start, self._rows(part, rows_range.by_mask))
        return output, weights

    def _attended(self) -> Output:
        """Output and weights; where rows are needed for it, they are shown at once."""
        by_view = [rows_range for rows_range in self._listeners if not rows_range.by_mask]
        if by_view and self.queries == 1:  # the rows are built anyway: the output comes from them
            rows = self._rows(slice(0, 1), False)
            for rows_range in by_view:
                _tell(self._listeners.pop(rows_range), 0, rows)
            return self._weighted(rows), rows
        if self.compute is not None:
            replaced = self.compute(self)
            if replaced is not None:
                return replaced
        if not self.by_mask:
            return self.stock(self.mask)
        if not self._needs_eager:
            return self._by(sdpa_attention(), self.query, self.mask)[0], None
        from_first = [rows_range for rows_range in self._listeners if rows_range.first == 0 and rows_range.by_mask]
        whole = next(iter(from_first), _RowRange(0, CHUNK, True))
        listeners = self._listeners.pop(whole, [])
        outputs = list[Tensor]()
        for part in whole.parts(self.queries):
            rows = self._rows(part, True)
            _tell(listeners, part.start, rows)
            outputs.append(self._weighted(rows))
        return torch.cat(outputs, 1), None

    def _by(self, own: Callable[..., Any], query: Tensor, mask: Tensor | None) -> Output:
        return own(self.module, query, self.key, self.value, mask, **self.settings)

    def _weighted(self, rows: Tensor) -> Tensor:
        """The values, weighted by attention rows."""
        # As in `attention_probs`: "batch (kv_head group) query key -> batch kv_head (group query) key".
        batch, heads, queries, keys = rows.shape
        kv_heads = batch * self.value.shape[1]
        probs = rows.to(self.value.dtype).reshape(kv_heads, -1, keys)
        output = torch.bmm(probs, self.value.reshape(kv_heads, keys, -1))
        return output.view(batch, heads, queries, -1).transpose(1, 2).contiguous()

    def _rows(self, part: slice, by_mask: bool) -> Rows:
        query = self.query
        keys = self.key.shape[2]
        if self.queries > 1:
            query = query[:, :, part]
        if by_mask:
            return attention_probs(
                query,
                self.key,
                None if self.mask is None else self.mask[:, :, part, :keys],
                scaling=self.scaling,
                first_query=keys - self.queries + part.start,
                softcap=self.softcap,
                sinks=self.sinks,
            )
        if self.queries == 1:
            view = None if self.complete else self.view
            return rows_by_view(self.module, query, self.key, view, self.settings.get("scaling"))
        assert self.view is not None
        later = self.queries - part.stop  # new tokens that none of these queries sees
        earlier = slice(0, keys - later)
        rows = rows_by_view(self.module, query, self.key[:, :, earlier], self.view.part(part, earlier), self.scaling)
        if later:
            return torch.nn.functional.pad(rows, (0, later))
        return rows


@dataclass(eq=False)
class OwnAttention(Attention):
    """Attention that a module outside transformers' attention interface computes itself.

    Attributes:
        parts: What it attended with.
    """

    parts: Parts = field(kw_only=True)

    @property
    def layer(self) -> int:
        """Number of the decoder layer."""
        return self.parts.layer

    @property
    def scaling(self) -> float:
        """Factor on the scores, as the scores of the last query say."""
        return self._fit[0]

    @property
    def is_biased(self) -> bool:
        """Whether the scores are more than products of queries and keys."""
        return self.parts.bias is not None or not self._is_fitted

    def shown_to_last(self) -> Bool[Tensor, "batch 1 1 key"]:
        """The keys that the module shows to the last query."""
        last = self.parts.scores(slice(self.queries - 1, self.queries))
        return last[:, :1] > self._hidden_below

    def visible(self, part: slice) -> Bool[Tensor, "batch 1 query key"]:
        """The keys that the module shows to some of the queries."""
        return self.parts.scores(part)[:, :1] > self._hidden_below

    @property
    def _hidden_below(self) -> float:
        """Scores below this are those of hidden keys; some modules divide their mask by the root of the width, too."""
        return torch.finfo(self.value.dtype).min / (2 * self.query.shape[-1] ** 0.5)

    def _bias(self) -> Float[Tensor, "batch head 1 key"] | None:
        """The bias of each key."""
        if self.parts.bias is None:
            return None
        assert self.view is not None and self.view.columns is not None
        return bias_at(self.parts.bias, self.view.pos, self.view.columns)

    @cached_property
    def _fit(self) -> tuple[float, float]:
        """The factor between products and scores of the last query, and how far these are from it, relatively."""
        scores = self.parts.scores(slice(self.queries - 1, self.queries)).float()
        seen = scores > self._hidden_below
        bias = self._bias()
        if bias is not None and not self.parts.lacks_bias:
            scores = scores - bias
        group = self.query.shape[1] // self.key.shape[1]
        key = self.key.float().repeat_interleave(group, 1)
        products = (self.query[:, :, -1:].float() @ key.mT)[seen]
        scores = scores[seen]
        factor = float((scores * products).sum() / (products * products).sum())
        return factor, float((scores - factor * products).abs().max() / scores.abs().max())

    @property
    def _is_fitted(self) -> bool:
        return self._fit[1] <= 1e-4 + 16 * torch.finfo(self.value.dtype).eps

    def stock(self, mask: Tensor | None) -> Output:
        """The module's own attention."""
        if self.parts.lacks_bias:
            return self.under_view(), None
        return self.parts.output, None

    def under_view(self) -> Float[Tensor, "batch query head d_value"]:
        """The module's own attention over what `view` shows."""
        return self._weighted(self._rows(slice(None), False))

    def row_function(self) -> Callable[[Tensor, Tensor, View], Tensor]:
        """A function that gives rows of any queries and keys of this layer by a view, and does not hold these."""
        if not self._is_fitted:
            raise UnsupportedError(
                f"the scores of layer {self.layer} are more than products of queries and keys, so those of earlier "
                "queries are not known: use a policy that scores by attention received (H2O), or by position",
                page="kv-session",
            )
        module, scaling, bias = self.module, self.scaling, self.parts.bias
        return lambda query, key, view: rows_by_view(module, query, key, view, scaling, bias)

    def _rows(self, part: slice, by_mask: bool) -> Rows:
        scores = self.parts.scores(part).float()
        if self.parts.lacks_bias:
            bias = self._bias()
            assert bias is not None
            scores = scores + bias
        if not by_mask:
            assert self.view is not None
            sees = widened(self.view.part(part, slice(None)).sees(), scores.shape[1])
            scores = scores.masked_fill(~sees, torch.finfo(torch.float32).min)
        return torch.softmax(scores, -1)


def _tell(listeners: Iterable[RowsFunction], first: int, rows: Tensor) -> None:
    for fn in listeners:
        fn(first, rows)


def shown(mask: Tensor) -> Bool[Tensor, "*shape"]:
    """Where a mask of either kind, bool or additive, shows a key."""
    if mask.is_floating_point():
        return mask > torch.finfo(mask.dtype).min / 2
    return mask


def _additive(mask: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """A mask that eager attention adds to its scores."""
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return added.masked_fill_(~mask, torch.finfo(dtype).min)


def rows_by_view(
    module: Any,
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    view: View | None,
    scaling: float | None,
    bias: Float[Tensor, "_ head _"] | None = None,
) -> Rows:
    """Attention rows of a module over what `view` shows, in float32.

    Args:
        module: Provides the soft cap and the learned sink logits.
        query: Queries after rotary.
        key: Keys after rotary.
        view: View of these queries and keys. None means that every query sees every key.
        scaling: Factor on the scores that the model passed to its attention, if known. None uses the module's.
        bias: Number for each head and column that is added to the scores.
    """
    softcap = sinks = None
    config = getattr(module, "config", None)
    if config is not None and stock_name(config) != "sdpa":
        softcap = getattr(config, "attn_logit_softcapping", None)
        sinks = getattr(module, "sinks", None)
    mask = added = None
    if view is not None:
        mask = widened(view.sees(), query.shape[1])
        if bias is not None and view.columns is not None:
            added = bias_at(bias, view.pos, view.columns)
    return attention_probs(
        query,
        key,
        mask,
        scaling=_scaling(module, query, scaling),
        first_query=key.shape[2] - 1,
        softcap=softcap,
        sinks=sinks,
        bias=added,
    )


def _scaling(module: Any, query: Tensor, passed: float | None) -> float:
    """The value that the model passes takes precedence: some models scale their queries themselves (OPT)."""
    scaling = passed
    if scaling is None:
        scaling = getattr(module, "scaling", None)
    if scaling is None:
        return float(query.shape[-1] ** -0.5)
    return float(scaling)


def widened(mask: Bool[Tensor, "batch _ *query key"], heads: int) -> Bool[Tensor, "batch _ *query key"]:
    """Expand from kv heads to query heads; a mask with a single head for all is left as it is."""
    kv_heads = mask.shape[1]
    if kv_heads in (1, heads):
        return mask
    return repeat(mask, "batch kv_head ... -> batch (kv_head group) ...", group=heads // kv_heads)


def attention_probs(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    mask: Bool[Tensor, "#batch #head query key"] | None,
    *,
    scaling: float,
    first_query: int,
    softcap: float | None = None,
    sinks: Float[Tensor, " head"] | None = None,
    bias: Float[Tensor, "batch head 1 key"] | None = None,
) -> Rows:
    """Softmax of scaled scores for some rows, in float32.

    Args:
        query: Queries after rotary.
        key: Keys after rotary, one per kv head; query heads share them in groups.
        mask: True where a key may be seen. None means causal, with the last query seeing every key.
        scaling: Factor on the scores.
        first_query: Number of keys that the first query may see, minus one (only used if `mask` is None).
        softcap: `cap * tanh(score / cap)` (Gemma 2).
        sinks: A learned logit per head that takes part in the softmax and is then dropped (gpt-oss).
        bias: Added to the scores (ALiBi).
    """
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1:3]
    # Without einops and einsum, because this runs in every layer for every generated token, where each costs a tenth:
    # "batch (kv_head group) query d_head, batch kv_head key d_head -> batch (kv_head group) query key"
    grouped = query.reshape(batch * kv_heads, -1, width).float()
    scores = torch.bmm(grouped, key.float().reshape(batch * kv_heads, keys, width).mT)
    scores = scores.view(batch, heads, queries, keys).mul_(scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if mask is None and first_query < keys - 1:
        last_seen = torch.arange(first_query, first_query + queries, device=query.device)
        mask = torch.arange(keys, device=query.device) <= rearrange(last_seen, "query -> query 1")
    if mask is not None:
        scores.masked_fill_(~mask, torch.finfo(torch.float32).min)
    if sinks is None:
        return torch.softmax(scores, -1)
    sink_scores = repeat(sinks.float(), "head -> batch head query 1", batch=batch, query=queries)
    return torch.softmax(torch.cat([scores, sink_scores], -1), -1)[..., :-1]


# Who listens, and to which model ----------------------------------------------------------------------------------

_HANDLERS: ContextVar[tuple[Handler, ...]] = ContextVar("sinkscope_tap", default=())
_LATEST: ContextVar[ref[Tensor] | None] = ContextVar("sinkscope_latest_queries", default=None)
_STOCK: dict[int, _Stock] = {}  # by id of a tapped configuration
_LOCK = threading.Lock()


@dataclass
class _Stock:
    """The attention that a tapped configuration selects by itself, and how often it is tapped."""

    name: str
    attention: (
        Callable[..., Any] | None
    )  # None: the one in the model's own file; stored because every layer asks for it
    times: int = 0

    @classmethod
    def of(cls, config: Any) -> _Stock:
        """What a configuration selects now."""
        from transformers import AttentionInterface

        return cls(attention_name(config), AttentionInterface().get(stock_name(config)))


def listen(handler: Handler) -> None:
    """Let a handler see attention in this context, before those that are already listening."""
    leave(handler)
    _HANDLERS.set((handler, *_HANDLERS.get()))


def leave(handler: Handler) -> None:
    """Stop a handler from listening in this context."""
    _HANDLERS.set(tuple(other for other in _HANDLERS.get() if other is not handler and not other.ended.is_set()))


@contextmanager
def listening(target: Target, see: Callable[[Attention], None]) -> Iterator[None]:
    """Context manager: `see` is called with every layer's attention; `by_mask` if it needs rows under the mask."""
    with tapped(target) as configs:
        listen(handler := Handler(see, configs, by_mask=True))
        try:
            yield
        finally:
            leave(handler)


@contextmanager
def tapped(target: Target) -> Iterator[frozenset[int]]:
    """Context manager: every configuration of the model selects the tap's attention; yields their ids.

    The names are registered with transformers once; this changes no other model. A model may be tapped several times.
    Attention outside transformers' interface is seen by hooks instead.
    """
    if not target.adapter.attention_interface:
        with uncompiled(), _tapped_outside(target) as ids:
            yield ids
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    if NAME not in AttentionInterface():
        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, _mask)
    configs = configs_of(target)
    with _LOCK:
        for config in configs:
            if id(config) not in _STOCK:
                _STOCK[id(config)] = _Stock.of(config)
            _STOCK[id(config)].times += 1
            set_attention(config, NAME)
    try:
        with uncompiled():
            yield frozenset(map(id, configs))
    finally:
        with _LOCK:
            for config in configs:
                stock = _STOCK[id(config)]
                stock.times -= 1
                if stock.times == 0:
                    set_attention(config, stock.name)
                    del _STOCK[id(config)]


@contextmanager
def _tapped_outside(target: Target) -> Iterator[frozenset[int]]:
    """Context manager: every attention module of the model is read; yields the ids of its configurations."""
    configs = frozenset(map(id, configs_of(target)))

    def wanted() -> tuple[bool, bool]:
        listeners = _listeners(configs)
        masks = any(handler.masks for handler in listeners)
        return masks or not all(handler.idle for handler in listeners), masks

    def attend(parts: Parts) -> Tensor:
        call = OwnAttention(parts.module, parts.query, parts.key, parts.value, None, {}, parts=parts)
        for handler in _listeners(configs):
            handler.see(call)
        return call.finish()[0]

    layers = [layer for layer in range(target.n_layers) if target.has_part(layer, target.adapter.attn)]
    modules = {layer: target.sub(layer, target.adapter.attn) for layer in layers}
    with reading(modules, target.name, attend, wanted):
        yield configs


def _listeners(configs: Iterable[int]) -> list[Handler]:
    """Who listens to a model with one of these configurations."""
    listeners: list[Handler] = []
    for handler in _HANDLERS.get():
        if not handler.ended.is_set() and not handler.configs.isdisjoint(configs):
            listeners.append(handler)
    return listeners


def stock_name(config: Any) -> str:
    """Name of the attention that the model uses when it is not tapped."""
    stock = _STOCK.get(id(config))
    name = attention_name(config) if stock is None else stock.name
    if name == NAME:
        return "eager"
    return name


def _stock_attention(module: Any) -> Callable[..., Any]:
    """The attention function that a module uses when it is not tapped."""
    stock = _STOCK.get(id(module.config)) or _Stock.of(module.config)
    return stock.attention or eager_attention(module)


def configs_of(target: Target) -> list[Any]:
    """Every distinct configuration object in the model that its attention may read."""
    configs: dict[int, Any] = {}
    for module in target.hf.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "model_type"):
            configs[id(config)] = config
    return list(configs.values())


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Output:
    """The attention function that transformers calls in every layer."""
    config = id(module.config)
    listeners: list[Handler] = []
    idle = True
    for handler in _HANDLERS.get():  # a plain loop: every layer comes here
        if config in handler.configs and not handler.ended.is_set():
            listeners.append(handler)
            idle = idle and handler.idle
    chosen = in_blocks = None
    indices = kwargs.pop("indices", None)  # the keys that an indexer chose (DeepSeek 3.2)
    if indices is not None:
        chosen = torch.zeros(len(indices), 1, query.shape[2], key.shape[2], dtype=torch.bool, device=indices.device)
        chosen.scatter_(-1, indices[:, None].long(), True)
    blocks = kwargs.pop("block_indices", None)  # the blocks of keys that an indexer chose (MiniMax M3)
    if blocks is not None:
        chosen = _within_blocks(module, attention_mask, blocks, query, key.shape[2], kwargs.get("position_ids"))
    if chosen is not None:
        attention_mask = _among_chosen(attention_mask, chosen)
        if blocks is not None:
            in_blocks = shown(attention_mask)
    if idle:
        return _stock_attention(module)(module, query, key, value, attention_mask, **kwargs)
    latest = _LATEST.get()
    is_again = latest is not None and latest() is query
    _LATEST.set(ref(query))
    call = Attention(
        module,
        query,
        key,
        value,
        attention_mask,
        kwargs,
        any(handler.by_mask for handler in listeners),
        indices=indices,
        in_blocks=in_blocks,
        is_again=is_again,
    )
    for handler in listeners:
        handler.see(call)
    return call.finish()


def _among_chosen(mask: Tensor | None, chosen: Bool[Tensor, "batch _ query key"]) -> Tensor:
    """A mask that shows only chosen keys, of those that it shows."""
    queries, keys = chosen.shape[2:]
    if mask is None:
        return chosen & torch.ones_like(chosen).tril(keys - queries)
    if mask.dtype == torch.bool:
        return mask[..., :keys] & chosen
    return mask[..., :keys].masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _within_blocks(
    module: Any, mask: Tensor | None, blocks: Tensor, query: Tensor, keys: int, positions: Tensor | None
) -> Bool[Tensor, "batch _ query key"]:
    """Which keys are in chosen blocks; modules make a mask of them for stock attention."""
    if positions is None:
        positions = torch.arange(keys - query.shape[2], keys, device=query.device)
    positions = positions.reshape(-1, query.shape[2]).expand(len(query), -1)
    return module.indexer.build_block_mask(blocks, mask, keys, query.dtype, query.device, positions) == 0


def _mask(*, config: Any, **kwargs: Any) -> Any:
    """The mask function that transformers calls once per forward call; no mask if a handler determines what is seen."""
    from transformers import AttentionMaskInterface

    name = stock_name(config)
    for handler in _listeners([id(config)]):
        if handler.masks:
            return None
        if handler.by_mask:
            name = "sdpa"
    return AttentionMaskInterface()[name](config=config, **kwargs)


# Measurements that listen --------------------------------------------------------------------------------------------

RowObserver = Callable[[int, int, Tensor], None]
VisibleRowObserver = Callable[[int, int, Tensor, Callable[[], Tensor]], None]


@contextmanager
def attention_rows(
    target: Target, observer: RowObserver, *, layers: list[int] | None = None, rows_per_chunk: int = 256
) -> Iterator[None]:
    """Context manager: every forward pass in this context shows its attention rows to `observer`.

    Args:
        target: The model.
        observer: Called as `observer(layer, first_query, rows)`; rows `[batch head query key]`, float32, after
            softmax. Learned sink logits take part, so that rows then sum to less than one. Keys are those in the
            cache: under a cache policy only the ones it keeps, so a key's index is not its position.
        layers: Layers to show. None shows all.
        rows_per_chunk: Number of queries shown at a time; memory is `batch x head x rows_per_chunk x key`.

    A TransformerBridge itself builds whole query x key matrices, which are passed on in one piece.
    """

    def rows_only(layer: int, first: int, rows: Tensor, _visible: Callable[[], Tensor]) -> None:
        observer(layer, first, rows)

    with visible_rows(target, rows_only, layers=layers, rows_per_chunk=rows_per_chunk):
        yield


@contextmanager
def visible_rows(
    target: Target, observer: VisibleRowObserver, *, layers: list[int] | None = None, rows_per_chunk: int = 256
) -> Iterator[None]:
    """As `attention_rows`, and the observer is also told which keys the queries see.

    Args:
        target: The model.
        observer: Called as `observer(layer, first_query, rows, visible)`; `visible()` gives `[batch 1 query key]`, what
            the mask shows. Of a TransformerBridge it is where some head has attention.
        layers: Layers to show. None shows all.
        rows_per_chunk: Number of queries shown at a time.
    """
    wanted = layers
    if wanted is None:
        wanted = list(range(target.n_layers))
    wanted = [layer for layer in wanted if target.has_attention(layer)]

    def see(call: Attention) -> None:
        layer = call.layer

        def tell(first: int, rows: Tensor) -> None:
            observer(layer, first, rows, lambda: call.visible(slice(first, first + rows.shape[2])))

        if layer in wanted:
            call.show(tell, by_mask=True, chunk=rows_per_chunk)

    if target.kind != "bridge":
        with listening(target, see):
            yield
        return
    hooks: list[tuple[Any, str, Any]] = []
    for layer in wanted:

        def read(rows: Tensor, layer: int = layer) -> None:
            observer(layer, 0, rows.float(), lambda: (rows > 0).any(1, keepdim=True))

        module = target.model.hook_dict[f"blocks.{layer}.attn.hook_pattern"]
        hooks.append((module, "post", on_output(read)))
    with target.hooks(*hooks):
        yield


def refuse_opaque(target: Target) -> None:
    """Refuse a model whose attention does not go through transformers, because its queries and keys are not visible."""
    if target.kind == "bridge" or not target.adapter.attention_interface:
        raise UnsupportedError(
            f"queries and keys of this {target.adapter.model_type} model ({target.kind}) are not offered: give another "
            "model, or a plain one (backend='hf')"
        )


@contextmanager
def eager(target: Target) -> Iterator[None]:
    """Context manager with the model's own eager attention, which returns its weights."""
    before = [(config, attention_name(config)) for config in configs_of(target)]
    try:
        for config, _ in before:
            set_attention(config, "eager")
        yield
    finally:
        for config, name in before:
            set_attention(config, name)
