"""What all cache policies and observers of one run share: the cache, the attention, and the moments to act.

Nothing is done that nobody asked for: without a policy the caller's cache stays as it is, without an observer no
attention row is built.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sinkscope.errors import UnsupportedError
from sinkscope.interventions.base import Run
from sinkscope.interventions.positions import Call
from sinkscope.kv import attention
from sinkscope.kv.bridge import bridge_hooks
from sinkscope.kv.cache import COLUMNS, CacheLayer, adopt
from sinkscope.kv.usage import Meter, Usage
from sinkscope.models.target import Target
from sinkscope.trace.attention import attention_probs, configs_of

_CHUNK = 256  # queries whose rows are built at a time


@dataclass(frozen=True, eq=False)
class Rows:
    """Attention rows of one layer in one call, some queries at a time.

    Attributes:
        layer: decoder layer.
        first: number of the first query among the new tokens of the call.
        probs: `[batch head query slot]`, float32, after softmax.
        pos: `[batch kv_head slot]`: true position of each slot, -1 where there is none.
        query_pos: `[batch query]`: true position of each query, -1 at padding.
        query: `[batch head query d_head]`, after rotary; None where the model does not show it.
        kv: the cache of the layer, if it is one of ours.
        call: the forward call.
    """

    layer: int
    first: int
    probs: Float[Tensor, "batch head query slot"]
    pos: Int[Tensor, "batch kv_head slot"]
    query_pos: Int[Tensor, "batch query"]
    query: Float[Tensor, "batch head query d_head"] | None
    kv: CacheLayer | None
    call: Call


@dataclass(eq=False)
class State:
    """What is known of one cache over the calls of a run.

    Attributes:
        prefilling: the last call was (a chunk of) a prompt.
        prompt: real tokens per row when the last prefill ended.
        decoded: single-token calls since then.
        dropped: tokens per row by which later ones move up (`positions="rebased"`).
        memory: of each policy, by its key.
    """

    prefilling: bool = False
    prompt: Int[Tensor, " batch"] | None = None
    decoded: int = 0
    dropped: Int[Tensor, " batch"] | None = None
    memory: dict[int, dict[Any, Any]] = field(default_factory=dict)
    queries: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)


@dataclass(frozen=True, eq=False)
class Moment:
    """A single-token call is about to run, or a call has run.

    Attributes:
        layers: the cache, layer by layer.
        call: the forward call.
        state: what is known of this cache.
        prefill_ended: this is the first such call since a prompt.
    """

    layers: list[CacheLayer]
    call: Call
    state: State
    prefill_ended: bool


@dataclass(frozen=True, eq=False)
class _Watch:
    fn: Callable[[Rows], None]
    layers: frozenset[int] | None
    last: int | None


class Session:
    """One per run; made by the first policy or observer that asks for it (`Session.of(run)`)."""

    def __init__(self, run: Run) -> None:
        target = run.target
        if not target.adapter.attention_interface:
            raise UnsupportedError(
                f"the attention of {target.adapter.model_type} cannot be replaced (it does not use transformers' "
                "attention interface): cache policies and attention observers do not work on it",
                page="kv-session",
            )
        self.run, self.target = run, target
        self._n_layers, self._n_kv_heads = target.n_layers, target.n_kv_heads
        self.owns_cache = False
        self.keep_queries, self._keep_from = 0, 2  # queries kept, of calls with at least so many tokens
        self._local = threading.local()
        self._policy: str | None = None
        self._scaling: dict[int, float] = {}
        self._watches: list[_Watch] = []
        self._before: list[Callable[[Moment], None]] = []
        self._after: list[Callable[[Moment], None]] = []
        self._states: WeakKeyDictionary[Any, State] = WeakKeyDictionary()
        self._meters: list[Meter] = []
        self._windows = [layer_window(target, i) for i in range(target.n_layers)]
        configs = configs_of(target)
        if any(str(config._attn_implementation).startswith("sinkscope") for config in configs):
            raise UnsupportedError(
                f"{target.name} is already inside a `with` that replaces its attention: enter them together, "
                "`(a | b).on(model)`",
                page="kv-session",
            )
        attention.register()
        before = attention.switch(configs)
        run.stack.callback(attention.restore, configs, before)
        run.hook(target.base, "pre", self._begin)
        run.hook(target.base, "post", self._end, always=True)
        if target.kind == "bridge":
            run.stack.enter_context(target.hooks(*bridge_hooks(self)))

    @classmethod
    def of(cls, run: Run) -> Session:
        """The session of a run."""
        if run.session is None:
            run.session = cls(run)
        return run.session

    # What policies and observers ask for ------------------------------------------------------------------------

    def claim(self, policy: object) -> None:
        """One policy decides what the cache keeps.

        Raises:
            UnsupportedError: another one was entered before.
        """
        name = type(policy).__name__
        if self._policy is not None:
            raise UnsupportedError(
                f"{self._policy} and {name} would both choose what the cache keeps: enter one of them",
                page="kv-session",
            )
        self._policy = name

    def own_cache(self) -> None:
        """Replace the layers of the caches that come by: needed by whoever evicts, hides or counts per slot."""
        self.owns_cache = True

    def watch(self, fn: Callable[[Rows], None], layers: list[int] | None = None, last: int | None = None) -> None:
        """Show attention rows to `fn` in every call: of these layers (None: all), of the last queries (None: all)."""
        self._watches.append(_Watch(fn, None if layers is None else frozenset(layers), last))

    def window_queries(self, last: int, decoding: bool = False) -> None:
        """Keep the last queries of a prompt, or of all calls, for `window_rows`, however many calls they came in."""
        self.keep_queries, self._keep_from = max(self.keep_queries, last), 1 if decoding else 2

    def before_decode(self, fn: Callable[[Moment], None]) -> None:
        """Call `fn` when a single-token call begins on a cache that holds something."""
        self._before.append(fn)

    def after_call(self, fn: Callable[[Moment], None]) -> None:
        """Call `fn` when any call with a cache is over."""
        self._after.append(fn)

    def window_rows(
        self, moment: Moment, layer: int, last: int
    ) -> tuple[Float[Tensor, "batch head query slot"], Int[Tensor, "batch query"]]:
        """Attention of the last queries to everything in the cache, recomputed in float32; and their positions."""
        query, query_pos = moment.state.queries[layer]
        query, query_pos = query[:, :, -last:], query_pos[:, -last:]
        kv = moment.layers[layer]
        assert kv.keys is not None
        return self._rows(layer, query, kv.keys, query_pos, kv.pos, kv.hidden), query_pos

    @property
    def usage(self) -> list[Usage]:
        """Of every cache of the run: tokens and bytes."""
        return [meter.usage() for meter in self._meters if meter.calls]

    # What the model calls ---------------------------------------------------------------------------------------

    @property
    def call(self) -> Call | None:
        """The forward call that this thread is in."""
        return getattr(self._local, "call", None)

    @property
    def cache(self) -> Any:
        """The cache of that call."""
        return getattr(self._local, "cache", None)

    @property
    def own_masks(self) -> bool:
        """The stock mask is not used in this call: some layer holds something else than all tokens so far."""
        return getattr(self._local, "own_masks", False)

    def _enter(self, call: Call | None, cache: Any, own_masks: bool) -> None:
        self._local.call, self._local.cache, self._local.own_masks = call, cache, own_masks
        COLUMNS.set(None if call is None else call.columns)
        attention.SESSION.set(None if call is None else self)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The attention of one layer in one call: the stock one, or one that knows what is missing."""
        call, layer = self.call, int(module.layer_idx)
        assert call is not None
        index = call.on(query.device)
        kv = self.layer(layer)
        if (scaling := kwargs.get("scaling")) is not None:
            self._scaling[layer] = float(scaling)
        if self.keep_queries and self.cache is not None and query.shape[2] >= self._keep_from:
            self._remember(layer, query, index)
        watches = self.watched(layer)
        window = self._windows[layer]
        if not watches and not self.own_masks:
            return attention.stock(module, query, key, value, mask, **kwargs)
        pos = self.positions(layer, key)
        hidden = kv.hidden if kv is not None else None
        if watches and query.shape[2] == 1:  # the rows are built anyway: the output comes from them
            rows = self._rows(layer, query, key, index, pos, hidden)
            for watch in watches:
                watch.fn(Rows(layer, 0, rows, pos, index, query, kv, call))
            grouped = rows.to(value.dtype).unflatten(1, (value.shape[1], -1))
            out = torch.einsum("bkgqn,bknd->bqkgd", grouped, value).flatten(2, 3)
            return out.contiguous(), rows
        if not self.own_masks:
            out, weights = attention.stock(module, query, key, value, mask, **kwargs)
        else:
            out, weights = self._masked(module, query, key, value, index, pos, hidden, window, **kwargs), None
        for watch in watches:
            begin = 0 if watch.last is None else max(0, query.shape[2] - watch.last)
            for start in range(begin, query.shape[2], _CHUNK):
                part = slice(start, start + _CHUNK)
                rows = self._rows(layer, query[:, :, part], key, index[:, part], pos, hidden)
                watch.fn(Rows(layer, start, rows, pos, index[:, part], query[:, :, part], kv, call))
        return out, weights

    def _masked(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, index: Tensor, pos: Tensor,
        hidden: Tensor | None, window: int | None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Attention to what is left of a cache."""
        kv = self.layer(int(module.layer_idx))
        whole = kv is not None and kv.edited and not kv.ragged and hidden is None and window is None
        if whole and query.shape[2] == 1:  # everything that is held is visible
            return attention.stock(module, query, key, value, None, **kwargs)[0]
        outputs: list[Tensor] = []
        for start in range(0, query.shape[2], attention.ROWS):
            part = slice(start, start + attention.ROWS)
            ok = attention.visible(pos, index[:, part], window, hidden)
            outputs.append(attention.masked(module, query[:, :, part], key, value, ok, **kwargs))
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]

    @staticmethod
    def _layers(cache: Any) -> list[CacheLayer]:
        return [layer for layer in cache.layers if type(layer) is CacheLayer]

    def layer(self, layer: int) -> CacheLayer | None:
        """Our cache of a layer in this call, if it is ours."""
        layers = getattr(self.cache, "layers", None)
        found = layers[layer] if layers and layer < len(layers) else None
        return found if type(found) is CacheLayer else None

    def positions(self, layer: int, key: Tensor) -> Int[Tensor, "batch kv_head slot"]:
        """True positions of the keys that a layer attends to."""
        kv = self.layer(layer)
        if kv is not None:
            return kv.pos
        assert self.call is not None
        slots = key.shape[2]
        columns = self.call.columns[:, -slots:].to(key.device)
        return columns[:, None].expand(len(columns), key.shape[1], slots)

    def visible(self, layer: int, query_pos: Tensor, pos: Tensor) -> Bool[Tensor, "batch kv_head query slot"]:
        """Which slots queries see in this layer."""
        kv = self.layer(layer)
        return attention.visible(pos, query_pos, self._windows[layer], kv.hidden if kv is not None else None)

    def watched(self, layer: int) -> list[_Watch]:
        """Observers of a layer."""
        return [w for w in self._watches if w.layers is None or layer in w.layers]

    def _rows(
        self, layer: int, query: Tensor, key: Tensor, query_pos: Tensor, pos: Tensor, hidden: Tensor | None
    ) -> Float[Tensor, "batch head query slot"]:
        module, config = self.attention_module(layer), self.target.config
        ok = attention.visible(pos, query_pos, self._windows[layer], hidden)
        groups = query.shape[1] // ok.shape[1]
        # What the model passes comes first: some scale their queries themselves (OPT) and pass one.
        scaling = self._scaling.get(layer, getattr(module, "scaling", None))
        return attention_probs(
            query, key, ok.repeat_interleave(groups, 1),
            scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            first_query=0,
            softcap=getattr(config, "attn_logit_softcapping", None),
            sinks=module.sinks if self.target.adapter.learned_sinks else None,
        )  # fmt: skip

    def attention_module(self, layer: int) -> Any:
        """The attention module of plain transformers, also below a bridge."""
        module: Any = self.target.sub(layer, self.target.adapter.attn)
        inner = getattr(module, "original_component", None)
        return inner if isinstance(inner, nn.Module) else module

    def _remember(self, layer: int, query: Tensor, index: Tensor) -> None:
        kept = self._state().queries
        if layer in kept and query.shape[2] < self.keep_queries:
            old_query, old_index = kept[layer]
            query, index = torch.cat([old_query, query], 2), torch.cat([old_index, index], 1)
        kept[layer] = (query[:, :, -self.keep_queries :].detach(), index[:, -self.keep_queries :])

    def remember(self, layer: int, query: Tensor) -> None:
        """The same for models that call no attention function of ours."""
        if self.keep_queries and self.call is not None and self.cache is not None and query.shape[2] >= self._keep_from:
            self._remember(layer, query, self.call.on(query.device))

    def _state(self) -> State:
        if self.cache not in self._states:
            state = self._states[self.cache] = State()
            self._meters.append(state.meter)
        return self._states[self.cache]

    def _begin(self, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        call = self.run.call
        if call is None:
            return None
        cache = kwargs.get("past_key_values")
        use = kwargs.get("use_cache")
        if cache is None and (self.target.config.use_cache if use is None else use):
            from transformers import DynamicCache

            cache = DynamicCache(config=self.target.config)
        if cache is not None and self.owns_cache:
            adopt(cache, self._n_layers, self._n_kv_heads, self.target.name)
        self._local.cache = cache
        own_masks = False
        if cache is not None:
            kwargs = {**kwargs, "past_key_values": cache}
            state = self._state()
            if self.owns_cache:
                self._moments(call, state)
                own_masks = self.target.kind == "bridge" or any(layer.edited for layer in self._layers(cache))
            if state.dropped is not None:
                kwargs["position_ids"] = (call.index - state.dropped[:, None]).clamp(min=0)
        self._enter(call, cache, own_masks)
        return args, kwargs

    def _moments(self, call: Call, state: State) -> None:
        new = call.index.shape[1]
        if new > 1 or call.past == 0:
            state.prefilling = True
            return
        ended, state.prefilling = state.prefilling, False
        if ended:
            state.prompt, state.decoded = (call.columns[:, : call.past] >= 0).sum(1), 0
        else:
            state.decoded += 1
        moment = Moment(self.cache.layers, call, state, ended)
        for fn in self._before:
            fn(moment)

    def _end(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        call, cache = self.call, self.cache
        try:
            if call is not None and output is not None and cache is not None and self.owns_cache:
                state = self._state()
                for fn in self._after:
                    fn(Moment(cache.layers, call, state, False))
                state.meter.note(cache.layers)
        finally:
            self._enter(None, None, False)


def layer_window(target: Target, layer: int) -> int | None:
    """Sliding window of a layer, in tokens; None: it sees everything."""
    config = target.config
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return int(window) if window else None
    return int(window) if window and kinds[layer] == "sliding_attention" else None
