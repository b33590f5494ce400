"""State shared by all cache policies and observers of one run: the cache, the attention, and the moments to act.

A session does only what is requested. Without a policy, the caller's cache is left unchanged; without an observer, no
attention rows are built.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.interventions.base import Intervention, Run
from sinkscope.interventions.positions import Call
from sinkscope.kv.cache import COLUMNS, CacheLayer, adopt
from sinkscope.kv.usage import Meter, Usage
from sinkscope.models.target import Target
from sinkscope.trace.attention import Attention, Handler, View, leave, listen, rows_by_view, tapped
from sinkscope.trace.internals import following_generate


@dataclass(frozen=True, eq=False)
class Rows:
    """Attention rows of one layer in one call, for a chunk of queries.

    Attributes:
        layer: Decoder layer.
        first: Index of the first query among the call's new tokens.
        probs: `[batch head query slot]`, float32, after softmax.
        pos: `[batch kv_head slot]`: true position of each slot, -1 if it holds no token.
        query_pos: `[batch query]`: true position of each query, -1 at padding.
        query: `[batch head query d_head]`, after rotary; None if the model does not expose it.
        kv: The layer's cache; None if it is not a sinkscope cache.
        call: The forward call.
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
    """What is known about one cache across the calls of a run.

    Attributes:
        prefilling: Whether the last call read a prompt or part of one.
        prompt: Number of real tokens in each row at the end of the last prefill.
        decoded: Number of single-token calls since then.
        dropped: Number of positions by which later tokens of each row are shifted towards the start
            (`positions="rebased"`).
        memory: What each policy remembers, by the policy's key.
        queries: The latest queries of each layer and their positions, if requested.
        meter: Counter of tokens and bytes.
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
    """The moment before or after a forward call.

    Attributes:
        layers: The cache, layer by layer.
        call: The forward call.
        state: What is known about this cache.
        prefill_ended: Whether this is the first single-token call after a prompt.
    """

    layers: list[CacheLayer]
    call: Call
    state: State
    prefill_ended: bool


def rebased_by(kv: CacheLayer, call: Call) -> Int[Tensor, " batch"] | None:
    """Number of positions by which new tokens of each row are shifted towards the start; None if they are not."""
    if not kv.rebased:
        return None
    return call.before - (kv.pos[:, 0] >= 0).sum(-1).to(call.before.device)


def layer_window(target: Target, layer: int) -> int | None:
    """Sliding window of a layer, in tokens; None if the layer sees everything."""
    config = target.config
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return int(window) if window else None
    return int(window) if window and kinds[layer] == "sliding_attention" else None


Watch = tuple[Callable[[Rows], None], frozenset[int] | None, int | None]
"""A function that sees rows; the layers (None: all); how many of the last queries (None: all)."""


class _Now(threading.local):
    """What the current thread is doing.

    Attributes:
        call: The current forward call.
        cache: The cache of that call.
        own_masks: Whether our masks replace the stock mask, because some layer does not hold all tokens so far.
        attended: Layers whose attention went through the tap; on a TransformerBridge some architectures do so.
        prompting: Whether `generate` is reading a prompt, so that even a single-token call is a part of it.
    """

    call: Call | None = None
    cache: Any = None
    own_masks: bool = False
    attended: set[int]
    prompting: bool = False


_OWNERS: WeakValueDictionary[int, Session] = WeakValueDictionary()
"""The session whose policy or guard acts on the cache or attention of a model, by the id of the model."""


class Session:
    """Shared by all policies and observers of a run; created by the first that asks for it (`Session.of(run)`).

    Attributes:
        now: What the current thread is doing.
        owns_cache: Whether the layers of the caches in use were replaced by `CacheLayer`.
        one_by_one: Whether a guard acts on generated tokens, which must then arrive one by one.
        anchors: Number of first positions that policies and guards in the same run keep.
        rewinder: Passes on what a guard removes from the output. None if nothing can be removed.
        resuming: Whether `generate` was called to continue after tokens were removed, so that it reads no prompt.
    """

    def __init__(self, run: Run) -> None:
        target = run.target
        if not target.adapter.attention_interface:
            raise UnsupportedError(
                f"the attention of {target.adapter.model_type} cannot be replaced (it does not use transformers' "
                "attention interface): use another model for cache policies and attention observers",
                page="kv-session",
            )
        self.run, self.target, self.now = run, target, _Now()
        self.owns_cache = self.one_by_one = self.resuming = False
        self.anchors = 0
        self.rewinder: Any = None
        self._keep_queries, self._keep_decoding = 0, False
        self._policy: str | None = None
        self._scaling: dict[int, float] = {}
        self._watches: list[Watch] = []
        self._before: list[Callable[[Moment], None]] = []
        self._after: list[Callable[[Moment], None]] = []
        self._followers: list[Callable[[Call, list[Any]], None]] = []
        self._prompts: list[Callable[[Moment], None]] = []
        self._prefill: Callable[[Attention, CacheLayer | None], Tensor | None] | None = None
        self._states: WeakKeyDictionary[Any, State] = WeakKeyDictionary()
        self._meters: list[Meter] = []
        self._windows = [layer_window(target, i) for i in range(target.n_layers)]
        configs = run.stack.enter_context(tapped(target))
        self._handler = Handler(self._see, configs, masks=lambda: self.now.own_masks)
        run.stack.callback(self._enter, None, None, False)  # after Ctrl-C no hook has run
        run.hook(target.base, "pre", self._begin)
        run.hook(target.base, "post", self._end, always=True)
        if target.kind == "bridge":
            run.stack.enter_context(target.hooks(*self._bridge_hooks()))

    @classmethod
    def of(cls, run: Run) -> Session:
        """The session of a run."""
        if run.session is None:
            run.session = cls(run)
        return run.session

    # What policies and observers ask for ------------------------------------------------------------------------

    def claim(self, policy: object) -> None:
        """Let `policy` decide what the cache keeps.

        Raises:
            UnsupportedError: Another policy was entered before.
        """
        name = type(policy).__name__
        if self._policy is not None:
            raise UnsupportedError(
                f"{self._policy} and {name} would both choose what the cache keeps: enter one of them",
                page="kv-session",
            )
        self._policy = name

    def own_cache(self) -> None:
        """Replace the layers of the caches in use by ours, which can evict, hide and count slots.

        Raises:
            UnsupportedError: Another run on this model already does this.
        """
        if not self.owns_cache:
            self._own()
            self.owns_cache = True
            self.run.stack.enter_context(following_generate(self.target.hf, self._prompting, self._check))

    def _own(self) -> None:
        """Only one run may act on the cache and the attention of a model; others may watch."""
        model = id(self.target.hf)
        if _OWNERS.setdefault(model, self) is not self:
            raise UnsupportedError(
                f"{self.target.name} is already inside a `with` that acts on its cache: enter them together, "
                "`(a | b).on(model)`",
                page="kv-session",
            )
        self.run.stack.callback(_OWNERS.pop, model, None)

    def watch(self, fn: Callable[[Rows], None], layers: list[int] | None = None, last: int | None = None) -> None:
        """Show `fn` the attention rows of `layers` and of the `last` queries in every call; None means all."""
        self._watches.append((fn, None if layers is None else frozenset(layers), last))

    def window_queries(self, last: int, decoding: bool = False) -> None:
        """Keep the `last` queries of prompts for `window_rows`; with `decoding`, also those of generated tokens."""
        self._keep_queries = max(self._keep_queries, last)
        self._keep_decoding |= decoding

    def before_decode(self, fn: Callable[[Moment], None]) -> None:
        """Call `fn` before every call that reads a single generated token."""
        self._before.append(fn)

    def before_prompt(self, fn: Callable[[Moment], None]) -> None:
        """Call `fn` before every call that reads a prompt or part of one."""
        self._prompts.append(fn)

    def replace_prefill(self, fn: Callable[[Attention, CacheLayer | None], Tensor | None]) -> None:
        """Let `fn` compute attention `[batch query head d_value]` in calls with several tokens.

        It is called with the attention, whose `view` is known, and with the layer's cache if that is a `CacheLayer`.
        If it returns None, the model's own attention is used.
        """
        self._own()
        self._prefill = fn

    def follow(self, fn: Callable[[Call, list[Any]], None]) -> None:
        """Call `fn` with the cache layers, of any kind, after every call that has a cache."""
        self._followers.append(fn)

    def after_call(self, fn: Callable[[Moment], None]) -> None:
        """Call `fn` after every call whose cache consists of `CacheLayer`s."""
        self._after.append(fn)

    def window_rows(self, moment: Moment, layer: int, last: int) -> Float[Tensor, "batch head query slot"]:
        """Recompute, in float32, the attention of the last queries to everything in the cache."""
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
        kv = moment.layers[layer]
        view = View(kv.pos, query_pos[:, -last:], self._windows[layer], kv.hidden)
        module: Any = self.target.sub(layer, self.target.adapter.attn)
        inner = getattr(module, "original_component", None)  # below a bridge
        module = inner if isinstance(inner, nn.Module) else module
        return rows_by_view(module, query[:, :, -last:], kv.keys, view, self._scaling.get(layer))

    @property
    def usage(self) -> list[Usage]:
        """Tokens and bytes of every cache of the run."""
        return [meter.usage() for meter in self._meters if meter.calls]

    # At the tap -------------------------------------------------------------------------------------------------

    def _see(self, call: Attention) -> None:
        """Handle the attention of one layer in one call: decide what computes it and who sees its rows."""
        layer = call.layer
        self.now.attended.add(layer)
        if call.key.dtype != call.query.dtype:  # rebased keys are float32
            call.key = call.key.to(call.query.dtype)
        self._scaling[layer] = call.scaling
        if self._keep_queries:
            self._remember(layer, call.query)
        watches = self._watched(layer)
        replaces = self._prefill is not None and call.query.shape[2] > 1
        if not watches and not self.now.own_masks and not replaces:
            return
        if call.view is None:
            call.view = self._view(layer, call.key)
        if self.now.own_masks or replaces:
            call.evicted, call.compute = self.now.own_masks, self._compute
        for fn, _, last in watches:
            first = 0 if last is None else max(0, call.query.shape[2] - last)
            call.show(self._shown(fn, layer, call.view, call.query), first=first)

    def _shown(
        self, fn: Callable[[Rows], None], layer: int, view: View, query: Tensor | None
    ) -> Callable[[int, Tensor], None]:
        def show(first: int, probs: Tensor) -> None:
            part = slice(first, first + probs.shape[2])
            queries = None if query is None else query[:, :, part]
            assert self.now.call is not None
            kv = self.layer(layer)
            fn(Rows(layer, first, probs, view.pos, view.query_pos[:, part], queries, kv, self.now.call))

        return show

    def _compute(self, call: Attention) -> tuple[Tensor, Tensor | None] | None:
        """Compute a prompt's attention by a replacement, or attention to the rest of a cache; None for stock."""
        layer, view = call.layer, call.view
        assert view is not None
        kv = self.layer(layer)
        if self._prefill is not None and call.query.shape[2] > 1:
            made = self._prefill(call, kv)
            if made is not None:
                return made, None
        if not self.now.own_masks:
            return None
        whole = kv is not None and kv.edited and not kv.ragged and view.hidden is None and view.window is None
        if whole and call.query.shape[2] == 1:  # everything that is held is visible
            return call.stock(None)[0], None
        return call.under_view(), None

    def layer(self, layer: int) -> CacheLayer | None:
        """The layer's cache in this call; None if it is not a `CacheLayer`."""
        layers = getattr(self.now.cache, "layers", None)
        found = layers[layer] if layers and layer < len(layers) else None
        return found if type(found) is CacheLayer else None

    def _view(self, layer: int, key: Tensor) -> View:
        """What the queries of this call see of `key` `[batch kv_head slot ...]`."""
        kv, call, hidden = self.layer(layer), self.now.call, None
        assert call is not None
        if kv is not None:
            pos, hidden = kv.pos, kv.hidden
        else:
            columns = call.columns[:, -key.shape[2] :].to(key.device)
            pos = columns[:, None].expand(len(columns), key.shape[1], key.shape[2])
        return View(pos, call.on(key.device), self._windows[layer], hidden)

    def _watched(self, layer: int) -> list[Watch]:
        return [watch for watch in self._watches if watch[1] is None or layer in watch[1]]

    def _remember(self, layer: int, query: Tensor) -> None:
        """Keep the latest queries of a layer, after rotary, if requested."""
        call = self.now.call
        if not self._keep_queries or call is None or self.now.cache is None:
            return
        if query.shape[2] == 1 and not (self._keep_decoding or self.now.prompting):
            return
        index, kept = call.on(query.device), self._state().queries
        if layer in kept and query.shape[2] < self._keep_queries:
            old_query, old_index = kept[layer]
            query, index = torch.cat([old_query, query], 2), torch.cat([old_index.to(index), index], 1)
        kept[layer] = (query[:, :, -self._keep_queries :].detach(), index[:, -self._keep_queries :])

    def _bridge_hooks(self) -> list[tuple[Any, str, Any]]:
        """Do the same on a TransformerBridge, which computes attention itself: hook points mask scores and show rows.

        For some architectures (OPT) the bridge calls the wrapped model's attention. The tap has then seen it, and
        nothing is done here. A bridge builds the whole query x key matrix in every layer, so use the plain model for
        long contexts.
        """
        points, pairs = self.target.model.hook_dict, list[tuple[Any, str, Any]]()
        for layer in range(self.target.n_layers):
            place = f"blocks.{layer}.attn."
            scores, pattern, remember = self._on_bridge(layer)
            pairs.append((points[place + "hook_attn_scores"], "post", scores))
            pairs.append((points[place + "hook_pattern"], "post", pattern))
            # In models without rotary positions, the projection gives the queries that attend. Where rotary positions
            # are applied elsewhere (NeoX, Phi-3), neither hook fires, and `window_rows` says so.
            rotary = place + "hook_rot_q" in points
            point = points.get(place + ("hook_rot_q" if rotary else "q.hook_out"))
            if point is not None and (rotary or self.target.adapter.absolute_positions):
                pairs.append((point, "post", remember))
        return pairs

    def _on_bridge(self, layer: int) -> tuple[Any, Any, Any]:
        queries: dict[int, Tensor] = {}  # by thread; kept only if scores follow, which are those of the bridge

        def scores(_module: Any, _args: Any, _kwargs: Any, scores: Tensor) -> Tensor | None:
            if (query := queries.pop(threading.get_ident(), None)) is not None:
                self._remember(layer, query)
            kv = self.layer(layer)
            if self.now.call is None or kv is None:
                return None
            ok: Bool[Tensor, "batch kv_head query slot"] = self._view(layer, kv.pos).sees()
            ok = ok.repeat_interleave(scores.shape[1] // ok.shape[1], 1)
            return torch.where(ok, scores, torch.finfo(scores.dtype).min)

        def pattern(_module: Any, _args: Any, _kwargs: Any, pattern: Tensor) -> None:
            watches = self._watched(layer)
            if self.now.call is None or not watches or layer in self.now.attended:
                return
            view = self._view(layer, pattern[:, : self.target.n_kv_heads, :1].transpose(2, 3))
            for fn, _, last in watches:
                first = 0 if last is None else max(0, pattern.shape[2] - last)
                self._shown(fn, layer, view, None)(first, pattern[:, :, first:].float())

        def remember(_module: Any, _args: Any, _kwargs: Any, query: Tensor) -> None:
            if query.ndim == 3:  # a projection: batch pos (head d_head)
                query = query.unflatten(-1, (self.target.n_heads, -1)).transpose(1, 2)
            queries[threading.get_ident()] = query

        return scores, pattern, remember

    # What the model calls ---------------------------------------------------------------------------------------

    def _enter(self, call: Call | None, cache: Any, own_masks: bool) -> None:
        self.now.call, self.now.cache, self.now.own_masks, self.now.attended = call, cache, own_masks, set()
        COLUMNS.set(None if call is None else call.columns)
        leave(self._handler) if call is None else listen(self._handler)

    def _prompting(self, reads: bool) -> None:
        self.now.prompting = reads and not self.resuming

    def _check(self, method: str, given: dict[str, Any]) -> None:
        """Refuse kinds of generation in which nothing could act on generated tokens.

        Raises:
            UnsupportedError: Generation is assisted, or runs without a cache.
        """
        if not self._before and not self.one_by_one:
            return
        if method != "_prefill":
            raise UnsupportedError(
                "assisted generation reads several tokens at a time and takes some back, and a cache policy acts on "
                "tokens that come one by one: generate without an assistant, or use Full",
                page="kv-session",
            )
        if not given.get("use_cache") and given.get("past_key_values") is None:
            raise UnsupportedError(
                "use_cache=False: there is no cache that a cache policy or a guard could act on: generate with "
                "use_cache=True, or without them",
                page="kv-session",
            )

    def _state(self) -> State:
        cache = self.now.cache
        if cache not in self._states:
            state = self._states[cache] = State()
            self._meters.append(state.meter)
        return self._states[cache]

    def _begin(self, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        call = self.run.call
        if call is None:
            return None
        cache = kwargs.get("past_key_values")
        use = kwargs.get("use_cache")
        if cache is None and (self.target.config.use_cache if use is None else use):
            from transformers import DynamicCache

            cache = DynamicCache(config=self.target.config)
        self.now.cache, own_masks = cache, False
        if cache is not None:
            kwargs = {**kwargs, "past_key_values": cache}
            if call.past == 0:  # the cache is new or was emptied
                self._states.pop(cache, None)
        if cache is not None and self.owns_cache:
            t = self.target
            adopt(cache, t.n_layers, t.n_kv_heads, t.name, call.columns[:, : call.past])
            state = self._state()
            self._moments(call, state)
            layers: list[Any] = cache.layers
            own_masks = t.kind == "bridge" or any(layer.edited for layer in layers)
            if (dropped := rebased_by(layers[0], call)) is not None:
                state.dropped = dropped
                given = kwargs.get("position_ids")
                new = torch.arange(call.past, call.columns.shape[1], device=call.index.device)[None]
                kwargs["position_ids"] = ((new if given is None else given) - dropped[:, None]).clamp(min=0)
        self._enter(call, cache, own_masks)
        return args, kwargs

    def _moments(self, call: Call, state: State) -> None:
        layers: list[CacheLayer] = self.now.cache.layers
        if call.index.shape[1] > 1 or call.past == 0 or self.now.prompting:
            state.prefilling = True
            for fn in self._prompts:
                fn(Moment(layers, call, state, False))
            return
        # If others filled the cache, or its rows were multiplied, it counts as a prompt that has just ended.
        known = state.prompt is not None and len(state.prompt) == len(call.index)
        ended, state.prefilling = state.prefilling or not known, False
        if ended:
            state.prompt, state.decoded = call.before, 0
        else:
            state.decoded += 1
        moment = Moment(layers, call, state, ended)
        for fn in self._before:
            fn(moment)

    def _end(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        call, cache = self.now.call, self.now.cache
        try:
            if call is None or output is None or cache is None:
                return
            for fn in self._followers:
                fn(call, cache.layers)
            if self.owns_cache:
                state = self._state()
                for fn in self._after:
                    fn(Moment(cache.layers, call, state, False))
                state.meter.note(cache.layers)
        finally:
            self._enter(None, None, False)


@dataclass(frozen=True)
class Observe(Intervention):
    """Show attention rows to a function; no full query x key matrix is stored.

    In a single-token call, the output of a watched layer is computed from the rows that are shown, and equals the stock
    output up to rounding. In other calls, the model's own attention computes the output.

    Attributes:
        fn: Called with `Rows`, one chunk of queries at a time.
        layers: Layers to watch. None watches all.
        last: How many of the last queries of each call to watch. None watches all.

    Example:
        >>> seen = []
        >>> watcher = Observe(lambda rows: seen.append(rows.probs.sum(-1)), layers=[0], last=1)
    """

    fn: Callable[[Rows], None]
    layers: Sequence[int] | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise SinkscopeError(f"last={self.last}: expected a number of queries from 1, or None for all")

    def enter(self, run: Run, key: int) -> None:
        """Watch."""
        layers = None if self.layers is None else run.target.chosen_layers(self.layers)
        Session.of(run).watch(self.fn, layers, self.last)
