"""The attention tap: the single attention function and mask function that tapped models use.

Handlers are injected. They see the attention of every layer as the model computes it, may replace it, and may request
its rows. If no handler acts, the model's own attention runs with the model's own mask, so the result equals the stock
one bit for bit. The tap does not know who listens, so measurements work under cache policies and guards.

Measurements listen through `attention_rows` and `queries_and_keys`. No full query x key matrix is stored: an observer
sees `rows_per_chunk` rows at a time. The rows include everything the architecture does to its scores: soft cap, window,
padding, learned sink logits. Under a cache policy they cover the keys that the cache keeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.models.target import Target
from sinkscope.trace.internals import attention_name, eager_attention, sdpa_attention, set_attention

NAME = "sinkscope"
CHUNK = 256
"""Queries whose rows are built at a time, if a handler does not say another number."""
_MASKED = 1024  # queries at a time where a mask has to be built

RowsFunction = Callable[[int, Tensor], None]
"""Called with the number of the first query and rows `[batch head query key]`."""


@dataclass(frozen=True, eq=False)
class View:
    """Which keys the queries of a call see, by true positions.

    Attributes:
        pos: Position of each key; -1 where there is none.
        query_pos: Position of each query; -1 at padding.
        window: Keys this far back and further are not seen. None means all are seen.
        hidden: Cached keys that are not attended to, by kv head or by query head. None means none.
    """

    pos: Int[Tensor, "batch kv_head key"]
    query_pos: Int[Tensor, "batch query"]
    window: int | None = None
    hidden: Bool[Tensor, "batch _ key"] | None = None

    def part(self, queries: slice, keys: slice) -> View:
        """Some of the queries and keys."""
        hidden = None if self.hidden is None else self.hidden[..., keys]
        return View(self.pos[..., keys], self.query_pos[:, queries], self.window, hidden)

    def sees(self) -> Bool[Tensor, "batch _ query key"]:
        """Keys that hold a token, are not later than the query, and are inside the window.

        Padding queries see all held keys, so that nothing is divided by zero; their output is never read.
        """
        pos = self.pos[:, :1] if self.hidden is None and self.pos.stride(1) == 0 else self.pos  # the same in every head
        key, query = pos[:, :, None, :], self.query_pos[:, None, :, None]
        ok = (key <= query) | (query < 0)
        if self.window is not None:
            ok = ok & ((key > query - self.window) | (query < 0))
        ok = ok & (key >= 0)
        return ok if self.hidden is None else widened(ok, self.hidden.shape[1]) & ~self.hidden[:, :, None, :]


@dataclass(frozen=True, eq=False)
class Handler:
    """A listener at the tap.

    Attributes:
        see: Called with the attention of every layer.
        configs: Ids of the configurations of the model it listens to.
        by_mask: Whether it needs rows under the model's mask, so that the mask must be complete (SDPA's).
        masks: Tells whether it determines what is seen in the running call, so that no mask is needed. None: never.
    """

    see: Callable[[Attention], None]
    configs: frozenset[int]
    by_mask: bool = False
    masks: Callable[[], bool] | None = None


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
        evicted: Whether `view` differs from the mask because tokens are missing in the cache.
        compute: Replaces the model's own attention unless it returns None.
    """

    module: Any
    query: Float[Tensor, "batch head query d_head"]
    key: Float[Tensor, "batch kv_head key d_head"]
    value: Float[Tensor, "batch kv_head key d_value"]
    mask: Tensor | None
    settings: dict[str, Any]
    by_mask: bool = False
    view: View | None = None
    evicted: bool = False
    compute: Callable[[Attention], tuple[Tensor, Tensor | None] | None] | None = None
    _shown: dict[tuple[int, int, bool], list[RowsFunction]] = field(default_factory=dict)

    @property
    def layer(self) -> int:
        """Number of the decoder layer."""
        return int(self.module.layer_idx)

    @property
    def scaling(self) -> float:
        """Factor on the scores."""
        return _scaling(self.module, self.query, self.settings.get("scaling"))

    @property
    def softcap(self) -> float | None:
        """The soft cap of the model's own attention; SDPA, if selected, drops it (or refuses to run)."""
        return None if stock_name(self.module.config) == "sdpa" else self.settings.get("softcap")

    @property
    def sinks(self) -> Tensor | None:
        """The learned sink logits of the model's own attention; SDPA, if selected, drops them."""
        return None if stock_name(self.module.config) == "sdpa" else self.settings.get("s_aux")

    def show(self, fn: RowsFunction, *, by_mask: bool = False, first: int = 0, chunk: int = CHUNK) -> None:
        """Show rows to `fn`, one chunk of queries at a time.

        Args:
            fn: Called with the index of the first query, and rows.
            by_mask: Compute rows under the mask; otherwise by `view`. If tokens were evicted, always by `view`.
            first: Index of the first query to show.
            chunk: Number of queries at a time.
        """
        self._shown.setdefault((first, chunk, by_mask and not self.evicted), []).append(fn)

    def stock(self, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The model's own attention under a mask of the model's own kind."""
        from transformers import AttentionInterface

        name, table = stock_name(self.module.config), AttentionInterface()
        own = table[name] if name in table else eager_attention(self.module)
        return own(self.module, self.query, self.key, self.value, mask, **self.settings)

    def under_view(self) -> Float[Tensor, "batch query head d_value"]:
        """The model's own attention over what `view` shows."""
        assert self.view is not None
        parts = list[Tensor]()
        # Eager is the one that knows soft caps and learned sink logits; where SDPA was chosen, the model goes without.
        slow = stock_name(self.module.config) == "eager" or self._capped
        for start in range(0, self.query.shape[2], _MASKED):
            part = slice(start, start + _MASKED)
            query = self.query[:, :, part]
            mask = widened(self.view.part(part, slice(None)).sees(), query.shape[1])
            if slow:
                mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(
                    ~mask, torch.finfo(query.dtype).min
                )
            own = eager_attention(self.module) if slow else sdpa_attention()
            parts.append(own(self.module, query, self.key, self.value, mask, **self.settings)[0])
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """The output `[batch query head d_value]`, and weights if there are any; shows rows to handlers."""
        by_view = [fn for (_, _, by_mask), fns in self._shown.items() for fn in fns if not by_mask]
        if by_view and self.query.shape[2] == 1:  # the rows are built anyway: the output comes from them
            rows = self._rows(slice(0, 1), False)
            for fn in by_view:
                fn(0, rows)
            self._shown = {key: fns for key, fns in self._shown.items() if key[2]}
            made: tuple[Tensor, Tensor | None] = self._joined(rows), rows
        else:
            made = self._made()
        for (first, chunk, by_mask), fns in self._shown.items():
            for start in range(first, self.query.shape[2], chunk):
                part = slice(start, min(start + chunk, self.query.shape[2]))
                exact = made[1] is not None and made[1].dtype == torch.float32 and not by_mask
                rows = made[1][:, :, part] if exact and made[1] is not None else self._rows(part, by_mask)
                for fn in fns:
                    fn(start, rows)
        return made

    @property
    def _capped(self) -> bool:
        """The model's own attention does what SDPA does not."""
        return self.softcap is not None or self.sinks is not None

    def _made(self) -> tuple[Tensor, Tensor | None]:
        made = None if self.compute is None else self.compute(self)
        if made is not None:
            return made
        if not self.by_mask:
            return self.stock(self.mask)
        if not self._capped:
            own = sdpa_attention()
            return own(self.module, self.query, self.key, self.value, self.mask, **self.settings)[0], None
        key = next((key for key in self._shown if key[0] == 0 and key[2]), (0, CHUNK, True))
        fns, parts = self._shown.pop(key, []), list[Tensor]()
        for start in range(0, self.query.shape[2], key[1]):
            rows = self._rows(slice(start, min(start + key[1], self.query.shape[2])), True)
            for fn in fns:
                fn(start, rows)
            parts.append(self._joined(rows))
        return torch.cat(parts, 1), None

    def _joined(self, rows: Tensor) -> Tensor:
        grouped = rows.to(self.value.dtype).unflatten(1, (self.value.shape[1], -1))
        return torch.einsum("bkgqn,bknd->bqkgd", grouped, self.value).flatten(2, 3).contiguous()

    def _rows(self, part: slice, by_mask: bool) -> Float[Tensor, "batch head query key"]:
        query, keys = self.query[:, :, part], self.key.shape[2]
        if by_mask:
            return attention_probs(
                query,
                self.key,
                None if self.mask is None else self.mask[:, :, part, :keys],
                scaling=self.scaling,
                first_query=keys - self.query.shape[2] + part.start,
                softcap=self.softcap,
                sinks=self.sinks,
            )
        assert self.view is not None
        later = self.query.shape[2] - part.stop  # new tokens that none of these queries sees
        seen = slice(0, keys - later)
        rows = rows_by_view(self.module, query, self.key[:, :, seen], self.view.part(part, seen), self.scaling)
        return torch.nn.functional.pad(rows, (0, later)) if later else rows


def rows_by_view(
    module: Any,
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    view: View,
    scaling: float | None,
) -> Float[Tensor, "batch head query key"]:
    """Attention rows of a module over what `view` shows, in float32.

    Args:
        module: Provides the soft cap and the learned sink logits.
        query: Queries after rotary.
        key: Keys after rotary.
        view: View of these queries and keys.
        scaling: Factor on the scores that the model passed to its attention, if known. None uses the module's.
    """
    capped = stock_name(module.config) != "sdpa"
    return attention_probs(
        query,
        key,
        widened(view.sees(), query.shape[1]),
        scaling=_scaling(module, query, scaling),
        first_query=0,
        softcap=getattr(module.config, "attn_logit_softcapping", None) if capped else None,
        sinks=getattr(module, "sinks", None) if capped else None,
    )


def _scaling(module: Any, query: Tensor, passed: float | None) -> float:
    """The value that the model passes takes precedence: some models scale their queries themselves (OPT)."""
    known = getattr(module, "scaling", None) if passed is None else passed
    return float(query.shape[-1] ** -0.5 if known is None else known)


def widened(mask: Bool[Tensor, "batch _ *query key"], heads: int) -> Bool[Tensor, "batch _ *query key"]:
    """Expand from kv heads to query heads; a mask with a single head for all is left as it is."""
    groups = heads // mask.shape[1] if mask.shape[1] > 1 else 1
    return mask.repeat_interleave(groups, 1) if groups > 1 else mask


def attention_probs(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    mask: Bool[Tensor, "#batch #head query key"] | None,
    *,
    scaling: float,
    first_query: int,
    softcap: float | None = None,
    sinks: Float[Tensor, " head"] | None = None,
) -> Float[Tensor, "batch head query key"]:
    """Softmax of scaled scores for some rows, in float32.

    Args:
        query: Queries after rotary.
        key: Keys after rotary, one per kv head; query heads share them in groups.
        mask: True where a key may be seen. None means causal, with the last query seeing every key.
        scaling: Factor on the scores.
        first_query: Number of keys that the first query may see, minus one (only used if `mask` is None).
        softcap: `cap * tanh(score / cap)` (Gemma 2).
        sinks: A learned logit per head that takes part in the softmax and is then dropped (gpt-oss).
    """
    groups = query.shape[1] // key.shape[1]
    grouped = query.unflatten(1, (key.shape[1], groups)).float()
    scores = (torch.einsum("bkgqd,bknd->bkgqn", grouped, key.float()) * scaling).flatten(1, 2)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        rows = torch.arange(first_query, first_query + query.shape[2], device=query.device)
        mask = torch.arange(key.shape[2], device=query.device) <= rows[:, None]
    scores.masked_fill_(~mask, torch.finfo(torch.float32).min)
    if sinks is None:
        return torch.softmax(scores, -1)
    extra = sinks.float()[None, :, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
    return torch.softmax(torch.cat([scores, extra], -1), -1)[..., :-1]


# Who listens, and to which model ----------------------------------------------------------------------------------

_HANDLERS: ContextVar[tuple[Handler, ...]] = ContextVar("sinkscope_tap", default=())
_STOCK: dict[int, tuple[str, int]] = {}  # by id of a tapped configuration: its own attention, and how often tapped
_LOCK = threading.Lock()


def listen(handler: Handler) -> None:
    """Let a handler see attention in this context, before those that are already listening."""
    _HANDLERS.set((handler, *(other for other in _HANDLERS.get() if other is not handler)))


def leave(handler: Handler) -> None:
    """Stop a handler from listening in this context."""
    _HANDLERS.set(tuple(other for other in _HANDLERS.get() if other is not handler))


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
def alone(see: Callable[[Attention], None]) -> Iterator[None]:
    """Context manager: of all handlers, only the one with this function listens."""
    token = _HANDLERS.set(tuple(handler for handler in _HANDLERS.get() if handler.see == see))
    try:
        yield
    finally:
        _HANDLERS.reset(token)


@contextmanager
def tapped(target: Target) -> Iterator[frozenset[int]]:
    """Context manager: every configuration of the model selects the tap's attention; yields their ids.

    The names are registered with transformers once; this changes no other model. A model may be tapped several times.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if NAME not in AttentionInterface():
        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, _mask)
    configs = configs_of(target)
    with _LOCK:
        for config in configs:
            name, times = _STOCK.get(id(config), (attention_name(config), 0))
            _STOCK[id(config)] = name, times + 1
            set_attention(config, NAME)
    try:
        yield frozenset(map(id, configs))
    finally:
        with _LOCK:
            for config in configs:
                name, times = _STOCK.pop(id(config))
                if times > 1:
                    _STOCK[id(config)] = name, times - 1
                else:
                    set_attention(config, name)


def stock_name(config: Any) -> str:
    """Name of the attention that the model uses when it is not tapped."""
    known = _STOCK.get(id(config))
    name = attention_name(config) if known is None else known[0]
    return "eager" if name == NAME else name


def configs_of(target: Target) -> list[Any]:
    """Every distinct configuration object in the model that its attention may read."""
    found = {id(m.config): m.config for m in target.hf.modules() if hasattr(getattr(m, "config", None), "model_type")}
    return list(found.values())


def _listening(config: Any) -> list[Handler]:
    return [handler for handler in _HANDLERS.get() if id(config) in handler.configs]


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention function that transformers calls in every layer."""
    handlers = _listening(module.config)
    by_mask = any(handler.by_mask for handler in handlers)
    call = Attention(module, query, key, value, attention_mask, kwargs, by_mask)
    for handler in handlers:
        handler.see(call)
    return call.finish()


def _mask(*, config: Any, **kwargs: Any) -> Any:
    """The mask function that transformers calls once per forward call; no mask if a handler determines what is seen."""
    from transformers import AttentionMaskInterface

    handlers = _listening(config)
    if any(handler.masks is not None and handler.masks() for handler in handlers):
        return None
    name = "sdpa" if any(handler.by_mask for handler in handlers) else stock_name(config)
    return AttentionMaskInterface()[name](config=config, **kwargs)


# Measurements that listen --------------------------------------------------------------------------------------------

RowObserver = Callable[[int, int, Tensor], None]
"""Called as `observer(layer, first_query, rows)` with rows `[batch head query key]`, float32."""
QKObserver = Callable[[int, bool, Tensor, Tensor], None]
"""Called as `observer(layer, rotated, query, key)`; `[batch head pos d_head]`, keys one per key/value head."""


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

    On a TransformerBridge, and for architectures outside transformers' attention interface (Falcon), the model
    itself builds whole query x key matrices, which are passed on in one piece.
    """
    wanted = range(target.n_layers) if layers is None else layers

    def see(call: Attention) -> None:
        if (layer := call.layer) in wanted:
            call.show(lambda first, rows: observer(layer, first, rows), by_mask=True, chunk=rows_per_chunk)

    def whole(layer: int) -> Any:
        return lambda _m, _a, _k, out: observer(layer, 0, (out if target.kind == "bridge" else out[1]).float())

    if target.kind == "bridge":
        points = target.model.hook_dict
        way, shown = nullcontext(), [points[f"blocks.{i}.attn.hook_pattern"] for i in wanted]
    elif target.adapter.attention_interface:
        way, shown = listening(target, see), []
    else:
        way, shown = eager(target), [target.sub(i, target.adapter.attn) for i in wanted]
    with way, target.hooks(*((module, "post", whole(i)) for i, module in zip(wanted, shown, strict=False))):
        yield


@contextmanager
def queries_and_keys(target: Target, observer: QKObserver, layers: list[int]) -> Iterator[None]:
    """Context manager: every forward pass shows its queries and keys to `observer`.

    They are taken where transformers passes them to its attention function, so norms on queries and keys, fused
    projections and partial rotary need no special code. Queries and keys before rotary are obtained by calling the same
    module once more with a rotation by zero.

    Args:
        target: The model; plain or nnsight.
        observer: Called as `observer(layer, rotated, query, key)`: first before rotary (after norms on queries and
            keys) with `rotated` False, then after rotary with True. Models without rotary give the same both times.
        layers: Layers to watch.

    Raises:
        UnsupportedError: The model is a TransformerBridge, which has its own attention, or outside transformers'
            attention interface (Falcon); or a forward pass has a cache, into which the extra call would write.
    """
    refuse_opaque(target)
    rotary: set[int] = set()
    nested = False

    def unrotated(layer: int) -> Any:
        """Call the attention module once more, with a rotation by zero."""

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal nested
            if nested or kwargs.get("position_embeddings") is None:
                return
            if kwargs.get("past_key_values") is not None:
                raise UnsupportedError(
                    "queries and keys before rotary are measured by calling the attention twice, which would write "
                    "into the cache twice: run the model with use_cache=False"
                )
            cos, sin = kwargs["position_embeddings"]
            rotary.add(layer)
            nested = True
            try:
                with alone(see):
                    module(*args, **{**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))})
            finally:
                nested = False

        return hook

    def see(call: Attention) -> None:
        if (layer := call.layer) in layers:
            if nested or layer not in rotary:
                observer(layer, False, call.query, call.key)
            if not nested:
                observer(layer, True, call.query, call.key)

    hooks = [(target.sub(i, target.adapter.attn), "pre", unrotated(i)) for i in layers]
    with listening(target, see), target.hooks(*hooks):
        yield


def refuse_opaque(target: Target) -> None:
    """Refuse a model whose attention does not go through transformers, because its queries and keys are not visible."""
    if target.kind == "bridge" or not target.adapter.attention_interface:
        bridge = target.kind == "bridge"
        what = "a TransformerBridge" if bridge else target.adapter.model_type
        remedy = "use a plain model (backend='hf')" if bridge else "give another model"
        raise UnsupportedError(f"queries and keys of {what} are not offered: {remedy}")


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
