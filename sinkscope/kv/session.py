"""What all cache policies and observers of one run share: the cache, the attention, and the moments to act.

Nothing is done that nobody asked for: without a policy the caller's cache stays as it is, without an observer no
attention row is built.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
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
from sinkscope.kv.generation import follow_generate
from sinkscope.kv.moments import Moment, Prompt, Rows, State, layer_window, rebased_by
from sinkscope.kv.usage import Meter, Usage
from sinkscope.trace.attention import attention_probs, configs_of

_CHUNK = 256  # queries whose rows are built at a time


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
                "attention interface): use another model for cache policies and attention observers",
                page="kv-session",
            )
        self.run, self.target = run, target
        self._n_layers, self._n_kv_heads = target.n_layers, target.n_kv_heads
        self.owns_cache = self.one_by_one = False
        self.keep_queries, self._keep_decoding = 0, False
        self._local = threading.local()
        self._policy: str | None = None
        self._scaling: dict[int, float] = {}
        self._watches: list[_Watch] = []
        self._before: list[Callable[[Moment], None]] = []
        self._after: list[Callable[[Moment], None]] = []
        self._prompts: list[Callable[[Moment], None]] = []
        self._prefill: Callable[[Prompt], Tensor | None] | None = None
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
        run.stack.callback(self._enter, None, None, False)  # after Ctrl-C no hook has run
        run.stack.enter_context(follow_generate(self))
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
        self.keep_queries = max(self.keep_queries, last)
        self._keep_decoding |= decoding

    def before_decode(self, fn: Callable[[Moment], None]) -> None:
        """Call `fn` when a generated token is about to be read: a single-token call that continues a prompt."""
        self._before.append(fn)

    def before_prompt(self, fn: Callable[[Moment], None]) -> None:
        """Call `fn` when (a piece of) a prompt is about to be read."""
        self._prompts.append(fn)

    def replace_prefill(self, fn: Callable[[Prompt], Tensor | None]) -> None:
        """Let `fn` compute attention `[batch query head d_value]` of several tokens; None: the stock one."""
        self._prefill = fn

    def after_call(self, fn: Callable[[Moment], None]) -> None:
        """Call `fn` when any call with a cache is over."""
        self._after.append(fn)

    def window_rows(self, moment: Moment, layer: int, last: int) -> Float[Tensor, "batch head query slot"]:
        """Attention of the last queries to everything in the cache, recomputed in float32."""
        if layer not in moment.state.queries:
            why = (
                f"a TransformerBridge of {self.target.adapter.model_type} does not show its queries as they attend: "
                "load the model with backend='hf'"
                if self.target.kind == "bridge"
                else "the latest queries were not seen, since this cache was filled outside of the `with`, or is a "
                "copy: read the prompt inside, into the cache to go on with"
            )
            raise UnsupportedError(why, page="kv-session")
        query, query_pos = moment.state.queries[layer]
        query, query_pos = query[:, :, -last:], query_pos[:, -last:]
        kv = moment.layers[layer]
        assert kv.keys is not None
        return self._rows(layer, query, kv.keys, query_pos, kv.pos, kv.hidden)

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
    def prompting(self) -> bool:
        """`generate` is reading a prompt: then even a call with a single token is a piece of it."""
        return getattr(self._local, "prompting", False)

    @prompting.setter
    def prompting(self, now: bool) -> None:
        self._local.prompting = now

    @property
    def acts_on_tokens(self) -> bool:
        """Somebody acts on generated tokens, so these must come one by one."""
        return bool(self._before) or self.one_by_one

    @property
    def own_masks(self) -> bool:
        """The stock mask is not used in this call: some layer holds something else than all tokens so far."""
        return getattr(self._local, "own_masks", False)

    @property
    def attended(self) -> set[int]:
        """Layers of this call whose attention came by here: on a TransformerBridge only some architectures do."""
        return self._local.attended

    def _enter(self, call: Call | None, cache: Any, own_masks: bool) -> None:
        self._local.call, self._local.cache, self._local.own_masks = call, cache, own_masks
        self._local.attended = set()
        COLUMNS.set(None if call is None else call.columns)
        attention.SESSION.set(None if call is None else self)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The attention of one layer in one call: the stock one, or one that knows what is missing."""
        layer = int(module.layer_idx)
        self.attended.add(layer)
        if key.dtype != query.dtype:  # rebased keys are float32
            key = key.to(query.dtype)
        if (scaling := kwargs.get("scaling")) is not None:
            self._scaling[layer] = float(scaling)
        if self.keep_queries:
            self.remember(layer, query)
        watches = self.watched(layer) if self._watches else []
        replaces = self._prefill is not None and query.shape[2] > 1
        if not watches and not self.own_masks and not replaces:
            return attention.stock(module, query, key, value, mask, **kwargs)
        call, kv, window = self.call, self.layer(layer), self._windows[layer]
        assert call is not None
        index = call.on(query.device)
        pos = self.positions(layer, key)
        hidden = kv.hidden if kv is not None else None
        if watches and query.shape[2] == 1:  # the rows are built anyway: the output comes from them
            rows = self._rows(layer, query, key, index, pos, hidden)
            for watch in watches:
                watch.fn(Rows(layer, 0, rows, pos, index, query, kv, call))
            grouped = rows.to(value.dtype).unflatten(1, (value.shape[1], -1))
            out = torch.einsum("bkgqn,bknd->bqkgd", grouped, value).flatten(2, 3)
            return out.contiguous(), rows
        made = None
        if self._prefill is not None and replaces:
            settings = {"scaling": getattr(module, "scaling", None), **kwargs}
            made = self._prefill(Prompt(layer, query, key, value, pos, index, kv, window, settings))
        if made is not None:
            out, weights = made, None
        elif not self.own_masks:
            out, weights = attention.stock(module, query, key, value, mask, **kwargs)
        else:
            out, weights = self._masked(module, query, key, value, index, pos, hidden, window, **kwargs), None
        for watch in watches:
            begin = 0 if watch.last is None else max(0, query.shape[2] - watch.last)
            for start in range(begin, query.shape[2], _CHUNK):
                part = slice(start, min(start + _CHUNK, query.shape[2]))
                later = query.shape[2] - part.stop  # new tokens that none of these queries sees
                if weights is not None and weights.dtype == torch.float32:
                    rows = weights[:, :, part]
                else:
                    seen = slice(0, key.shape[2] - later)
                    veiled = None if hidden is None else hidden[..., seen]
                    rows = self._rows(layer, query[:, :, part], key[:, :, seen], index[:, part], pos[..., seen], veiled)
                    rows = torch.nn.functional.pad(rows, (0, later)) if later else rows
                watch.fn(Rows(layer, start, rows, pos, index[:, part], query[:, :, part], kv, call))
        return out, weights

    def _masked(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        index: Tensor,
        pos: Tensor,
        hidden: Tensor | None,
        window: int | None,
        **kwargs: Any,
    ) -> Tensor:
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
        if hidden is None and pos.stride(1) == 0:
            pos = pos[:, :1]  # the same in every head: the mask need not be made for each
        ok = attention.visible(pos, query_pos, self._windows[layer], hidden)
        groups = query.shape[1] // ok.shape[1] if ok.shape[1] > 1 else 1
        # What the model passes comes first: some scale their queries themselves (OPT) and pass one.
        scaling = self._scaling.get(layer, getattr(module, "scaling", None))
        return attention_probs(
            query,
            key,
            ok.repeat_interleave(groups, 1) if groups > 1 else ok,
            scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            first_query=0,
            softcap=None if attention.stock_name(config) == "sdpa" else getattr(config, "attn_logit_softcapping", None),
            sinks=module.sinks if self.target.adapter.learned_sinks else None,
        )

    def attention_module(self, layer: int) -> Any:
        """The attention module of plain transformers, also below a bridge."""
        module: Any = self.target.sub(layer, self.target.adapter.attn)
        inner = getattr(module, "original_component", None)
        return inner if isinstance(inner, nn.Module) else module

    def remember(self, layer: int, query: Tensor) -> None:
        """Queries of a layer in this call, after rotary: the latest are kept, if someone asked for them."""
        call = self.call
        if not self.keep_queries or call is None or self.cache is None:
            return
        if query.shape[2] == 1 and not (self._keep_decoding or self.prompting):
            return
        index, kept = call.on(query.device), self._state().queries
        if layer in kept and query.shape[2] < self.keep_queries:
            old_query, old_index = kept[layer]
            query, index = torch.cat([old_query, query], 2), torch.cat([old_index.to(index), index], 1)
        kept[layer] = (query[:, :, -self.keep_queries :].detach(), index[:, -self.keep_queries :])

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
            adopt(cache, self._n_layers, self._n_kv_heads, self.target.name, call.columns[:, : call.past])
        self._local.cache = cache
        own_masks = False
        if cache is not None:
            kwargs = {**kwargs, "past_key_values": cache}
            if call.past == 0:  # a new cache, or one that was emptied
                self._states.pop(cache, None)
            state = self._state()
            if self.owns_cache:
                self._moments(call, state)
                own_masks = self.target.kind == "bridge" or any(layer.edited for layer in self._layers(cache))
                if (dropped := rebased_by(self._layers(cache)[0], call)) is not None:
                    state.dropped = dropped
                    given = kwargs.get("position_ids")
                    new = torch.arange(call.past, call.columns.shape[1], device=call.index.device)[None]
                    kwargs["position_ids"] = ((new if given is None else given) - dropped[:, None]).clamp(min=0)
        self._enter(call, cache, own_masks)
        return args, kwargs

    def _moments(self, call: Call, state: State) -> None:
        if call.index.shape[1] > 1 or call.past == 0 or self.prompting:
            state.prefilling = True
            for fn in self._prompts:
                fn(Moment(self.cache.layers, call, state, False))
            return
        # A cache that others filled, or one whose rows were multiplied, is taken as a prompt that has just ended.
        known = state.prompt is not None and len(state.prompt) == len(call.index)
        ended, state.prefilling = state.prefilling or not known, False
        if ended:
            state.prompt, state.decoded = call.before, 0
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
