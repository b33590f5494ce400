"""State shared by all cache policies and observers of one run: the cache, the attention, and the moments to act.

A session does only what is requested. Without a policy, the caller's cache is left unchanged; without an observer, no
attention rows are built.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from sinkscope.errors import SinkscopeWarning, UnsupportedError
from sinkscope.files.records import Natural, check_values
from sinkscope.interventions.base import Intervention, Run
from sinkscope.interventions.positions import Call
from sinkscope.kv.cache import COLUMNS, CacheLayer, adopt, new_cache, own_layers
from sinkscope.kv.usage import Meter, Usage
from sinkscope.lines.choice import HeadLines
from sinkscope.models.scope import cache_layers
from sinkscope.models.target import Target
from sinkscope.trace.attention import (
    NAME,
    Attention,
    ChunkWindow,
    Handler,
    OwnAttention,
    View,
    leave,
    listen,
    rows_by_view,
    tapped,
    widened,
)
from sinkscope.trace.internals import attention_name, following_generate


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Attention rows of one layer in one call, for a chunk of queries.

    Attributes:
        layer: Decoder layer.
        first: Index of the first query among the call's new tokens.
        probs: `[batch head query slot]`, float32, after softmax.
        view: What the queries of the call see; None if there is one, and it sees every slot of `kv`.
        query: `[batch head query d_head]`, after rotary; None if the model does not expose it.
        kv: The layer's cache; None if it is not a sinkscope cache.
        call: The forward call.
    """

    layer: int
    first: int
    probs: Float[Tensor, "batch head query slot"]
    view: View | None
    query: Float[Tensor, "batch head query d_head"] | None
    kv: CacheLayer | None
    call: Call

    @cached_property
    def pos(self) -> Int[Tensor, "batch kv_head slot"]:
        """True position of each slot, -1 if it holds no token; those of the cache when they are first asked for."""
        if self.view is not None:
            return self.view.pos
        assert self.kv is not None
        return self.kv.pos

    @property
    def query_pos(self) -> Int[Tensor, "batch query"]:
        """True position of each query, -1 at padding."""
        return self.call.on(self.probs.device)[:, self.first : self.first + self.probs.shape[2]]


@dataclass(frozen=True, eq=False)
class LatestQueries:
    """The latest queries of a layer, after rotary, and their true positions; -1 at padding."""

    query: Float[Tensor, "batch head query d_head"]
    pos: Int[Tensor, "batch query"]


@dataclass(eq=False)
class CacheState:
    """What is known about one cache across the calls of a run.

    Attributes:
        prefilling: Whether the last call read a prompt or part of one.
        prompt: Number of real tokens in each row at the end of the last prefill.
        decoded: Number of single-token calls since then.
        reorders: `CacheLayer.reorders` when the last prompt was read.
        dropped: Number of positions by which later tokens of each row are shifted towards the start
            (`positions="rebased"`).
        padded: Whether the last prompt is padded.
        uniform: Whether every layer and head has held the same positions since.
        memory: What each intervention remembers, by its key.
        queries: The latest queries of each layer, if requested.
        flat: Layers in which no head had lines of attention when they were last looked for (`LoopServe`).
        meter: Counter of tokens and bytes.
    """

    prefilling: bool = False
    prompt: Int[Tensor, " batch"] | None = None
    decoded: int = 0
    reorders: int = 0
    dropped: Int[Tensor, " batch"] | None = None
    padded: bool = False
    uniform: bool = False
    memory: dict[int, dict[Any, Any]] = field(default_factory=dict)
    queries: dict[int, LatestQueries] = field(default_factory=dict)
    flat: set[int] = field(default_factory=set)
    meter: Meter = field(default_factory=Meter)


@dataclass(frozen=True, eq=False)
class Moment:
    """The moment before or after a forward call.

    Attributes:
        cache: The cache.
        layers: Those of its layers that hold keys and values; `number` says of which decoder layer.
        call: The forward call.
        state: What is known about this cache.
        prefill_ended: Whether this is the first single-token call after a prompt.
    """

    cache: Any
    layers: list[CacheLayer]
    call: Call
    state: CacheState
    prefill_ended: bool


@dataclass(frozen=True, eq=False)
class Watcher:
    """A function that sees attention rows.

    Attributes:
        fn: The function.
        layers: Layers that it sees; None for all.
        last: How many of the last queries of a call it sees; None for all.
    """

    fn: Callable[[AttentionRows], None]
    layers: frozenset[int] | None
    last: int | None

    def first_query(self, queries: int) -> int:
        """Index of the first of so many queries that it sees."""
        if self.last is None:
            return 0
        return max(0, queries - self.last)


class CurrentCall(threading.local):
    """What the current thread is doing.

    Attributes:
        call: The forward call; None outside of one.
        cache: The cache of that call.
        own_masks: Whether our masks replace the stock mask, because some layer does not hold all tokens so far.
        tapped_layers: Layers whose attention went through the tap; on a TransformerBridge some architectures do so.
        bridge_queries: Queries of layers of a TransformerBridge whose scores have not come yet.
        prompting: Whether `generate` is reading a prompt, so that even a single-token call is a part of it.
        settings: Settings of the latest `generate`; None without one.
        ended: The moment after the layers of the latest call, until the logits have come.
        handler: Our listener at the tap.
        chosen: Positions that the latest indexer chose for each query.
    """

    call: Call | None = None
    cache: Any = None
    handler: Handler | None = None
    chosen: Tensor | None = None
    own_masks: bool = False
    tapped_layers: set[int]
    bridge_queries: dict[int, Tensor]
    prompting: bool = False
    settings: Any = None
    ended: Moment | None = None


_OWNERS: WeakValueDictionary[int, Session] = WeakValueDictionary()
"""The session whose policy or guard acts on the cache or attention of a model, by the id of the model."""


class Session:
    """Shared by all policies and observers of a run; created by the first that asks for it (`Session.of(run)`).

    Attributes:
        now: What the current thread is doing.
        owns_cache: Whether the layers of the caches in use were replaced by `CacheLayer`.
        followers: Names of what follows the generated tokens of each row, which must come one by one.
        anchors: Number of first positions that policies and guards in the same run keep.
        rewinder: Passes on what a guard removes from the output. None if nothing can be removed.
        resuming: Whether `generate` was called to continue after tokens were removed, so that it reads no prompt.
        line_follower: Called as `line_follower(layer, row, lines)` for every prompt row that is read along lines.
        counts_reads: Whether `usage` counts the tokens that decoding steps attend to.
    """

    def __init__(self, run: Run) -> None:
        target = run.target
        if not target.adapter.attention_interface and target.kind == "bridge":
            raise UnsupportedError(
                f"the attention of {target.adapter.model_type} cannot be replaced on a TransformerBridge: load the "
                "model with backend='hf'",
                page="kv-session",
            )
        if target.config.model_type == "minimax" and target.config.sliding_window is not None:
            raise UnsupportedError(
                f"transformers forgets the window of {target.name} when it decodes with a cache, so that there is no "
                "full cache to compare with: set sliding_window=None in its configuration, or use another model",
                page="kv-session",
            )
        if not cache_layers(target):
            raise UnsupportedError(
                f"the cache of {target.name} has no layer that holds keys and values alone: use another model for "
                "cache policies and attention observers",
                page="kv-session",
            )
        self.run = run
        self.target = target
        self.now = CurrentCall()
        self.owns_cache = False
        self.followers: list[str] = []
        self.anchors = 0
        self.rewinder: Any = None
        self.resuming = False
        self.line_follower: Callable[[int, int, HeadLines], None] | None = None
        self.counts_reads = False
        self._policy_name: str | None = None
        self._acted: bool | None = None  # False: the model was called, but never to decode, nor by `generate`
        self._queries_kept = 0
        self._keeps_decoding_queries = False
        self._row_functions: dict[int, Callable[[Tensor, Tensor, View], Tensor]] = {}
        self._watchers: list[Watcher] = []
        self._before_decode: list[Callable[[Moment], None]] = []
        self._after_call: list[Callable[[Moment], None]] = []
        self._prefill: Callable[[Attention, CacheLayer | None], Tensor | None] | None = None
        self._states: WeakKeyDictionary[Any, CacheState] = WeakKeyDictionary()
        self._meters: list[Meter] = []
        self._windows = [layer_window(target, layer) for layer in range(target.n_layers)]
        self._config = target.config
        self._configs = run.stack.enter_context(tapped(target))
        run.stack.callback(self._leave_call)  # after Ctrl-C no hook has run
        run.stack.push(self._warn_of_idle_policy)
        run.hook(target.base, "pre", self._begin)
        run.hook(target.base, "post", self._end, always=True)
        if target.kind == "bridge":
            run.stack.enter_context(target.hooks(*self._bridge_hooks()))
        for layer in range(target.n_layers):
            if not target.has_attention(layer):
                continue
            attention = target.sub(layer, target.adapter.attn)
            if getattr(attention, "indexer", None) is not None:
                run.hook(attention, "pre", partial(self._mask_indexer, layer))

    @classmethod
    def of(cls, run: Run) -> Session:
        """The session of a run."""
        if run.session is None:
            run.session = cls(run)
        return run.session

    # What policies and observers ask for ------------------------------------------------------------------------

    def _warn_of_idle_policy(self, error: type[BaseException] | None, *_: Any) -> None:
        """Warn that nothing was measured, if the model ran and the policy of a run never came to act."""
        if error is None and self._acted is False and self._before_decode and self._prefill is None:
            warnings.warn(
                f"{self._policy_name or 'the intervention'} never acted: it acts when a generated token follows a "
                "prompt, and only prompts were read, so all results are those of the full cache; generate, or feed "
                "tokens one by one with past_key_values",
                SinkscopeWarning,
                stacklevel=2,
            )

    def own_cache(self, policy: str | None = None) -> None:
        """Replace the layers of the caches in use by ours, which can evict, hide and count slots.

        Args:
            policy: Name of the policy that decides what the cache keeps, if one asks.

        Raises:
            UnsupportedError: Another run on this model already does this, or another policy was entered before.
        """
        if policy is not None and self._policy_name is not None:
            raise UnsupportedError(
                f"{self._policy_name} and {policy} would both choose what the cache keeps: enter one of them",
                page="kv-session",
            )
        self._policy_name = policy or self._policy_name
        if not self.owns_cache:
            self._own_model()
            self.owns_cache = True
            self.run.stack.callback(self._settle)
            self.run.stack.enter_context(following_generate(self.target.hf, self._set_prompting, self._check_generate))

    def _settle(self) -> None:
        """Leave whole caches behind."""
        for cache in self._states:
            for kv in own_layers(cache):
                kv.settle()

    def _own_model(self) -> None:
        """Only one run may act on the cache and the attention of a model; others may watch."""
        model = id(self.target.hf)
        if _OWNERS.setdefault(model, self) is not self:
            raise UnsupportedError(
                f"{self.target.name} is already inside a `with` that acts on its cache: enter them together, "
                "`(a | b).on(model)`",
                page="kv-session",
            )
        self.run.stack.callback(_OWNERS.pop, model, None)

    def watch(
        self, fn: Callable[[AttentionRows], None], layers: list[int] | None = None, last: int | None = None
    ) -> None:
        """Show `fn` the attention rows of `layers` and of the `last` queries in every call; None means all."""
        self._watchers.append(Watcher(fn, None if layers is None else frozenset(layers), last))

    def window_queries(self, last: int, decoding: bool = False) -> None:
        """Keep the `last` queries of prompts for `window_rows`; with `decoding`, also those of generated tokens."""
        self._queries_kept = max(self._queries_kept, last)
        self._keeps_decoding_queries = self._keeps_decoding_queries or decoding

    def before_decode(self, fn: Callable[[Moment], None]) -> None:
        """Call `fn` before every call that reads a single generated token."""
        self._before_decode.append(fn)

    def replace_prefill(self, fn: Callable[[Attention, CacheLayer | None], Tensor | None]) -> None:
        """Let `fn` compute attention `[batch query head d_value]` in calls with several tokens.

        It is called with the attention, whose `view` is known, and with the layer's cache if that is a `CacheLayer`.
        If it returns None, the model's own attention is used.
        """
        self._own_model()
        self._prefill = fn

    def after_call(self, fn: Callable[[Moment], None]) -> None:
        """Call `fn` after every call whose cache consists of `CacheLayer`s."""
        self._after_call.append(fn)

    def window_rows(self, moment: Moment, layer: int, last: int) -> Float[Tensor, "batch head query slot"]:
        """Recompute, in float32, the attention of the last queries to everything in the cache."""
        if layer not in moment.state.queries:
            raise UnsupportedError(
                "the latest queries were not seen: this cache was filled outside of the `with`, or is a copy (read the "
                "prompt inside, into the cache to go on with), or the model is a TransformerBridge that hides them "
                f"(load {self.target.adapter.model_type} with backend='hf')",
                page="kv-session",
            )
        latest = moment.state.queries[layer]
        kv = moment.cache.layers[layer]
        module: Any = self.target.sub(layer, self.target.adapter.attn)
        keys = kv.keys
        if hasattr(module, "expand_kv"):  # the cache holds latent vectors, from which the module makes keys
            keys = module.expand_kv(kv.keys, kv.own_values)[0]
        below_bridge = getattr(module, "original_component", None)
        if isinstance(below_bridge, nn.Module):
            module = below_bridge
        columns = moment.call.columns[:, : moment.call.past].to(keys.device)
        view = View(kv.pos, latest.pos[:, -last:], self._windows[layer], kv.hidden, columns=columns)
        query = latest.query[:, :, -last:]
        rows = self._row_functions.get(layer)
        if rows is None:
            return rows_by_view(module, query, keys, view, None)
        return rows(query, keys, view)

    @property
    def usage(self) -> list[Usage]:
        """Tokens and bytes of every cache of the run."""
        return [meter.usage() for meter in self._meters if meter.calls]

    # At the tap -------------------------------------------------------------------------------------------------

    def _see(self, attention: Attention) -> None:
        """Handle the attention of one layer in one call: decide what computes it and who sees its rows."""
        layer = attention.layer
        queries = attention.query.shape[2]
        self.now.tapped_layers.add(layer)
        if attention.key.dtype != attention.query.dtype:  # rebased keys are float32
            attention.key = attention.key.to(attention.query.dtype)
        if self._queries_kept:
            attention.view = self._view_of(attention)
            self._row_functions[layer] = attention.row_function()
            if not attention.is_again:
                self._keep_queries(layer, attention.query)
        if queries > 1 and self.owns_cache and not self.now.own_masks:
            self._check_view(attention, self._view_of(attention))
        watchers = self._watchers_of(layer)
        replaces = self.now.own_masks or (self._prefill is not None and queries > 1)
        if not watchers and not replaces:
            return
        attention.complete = self._sees_all(attention)
        needs_view = not attention.complete or isinstance(attention, OwnAttention)  # whose scores may need positions
        if attention.view is None and needs_view:
            attention.view = self._view_of(attention)
        if replaces:
            attention.evicted = self.now.own_masks
            attention.compute = self._compute
        for watcher in watchers:
            show = partial(self._show_rows, watcher, layer, attention.view, attention.query)
            attention.show(show, first=watcher.first_query(queries))

    def _sees_all(self, attention: Attention) -> bool:
        """Whether a single query certainly sees every slot of its layer."""
        if attention.query.shape[2] > 1 or attention.indices is not None or attention.in_blocks is not None:
            return False
        kv = self.layer(attention.layer)
        return kv is not None and kv.complete and self._windows[attention.layer] is None

    def _mask_indexer(self, layer: int, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Give an indexer a mask of what its layer holds, from which it then chooses."""
        kv, call = self.layer(layer), self.now.call
        if not self.now.own_masks or kv is None or call is None:
            return None
        query_pos = call.on(kv.keys.device)
        new = rearrange(query_pos, "batch query -> batch 1 query")
        hidden = kv.hidden
        if hidden is not None:
            hidden = torch.nn.functional.pad(hidden, (0, new.shape[-1]))
        view = View(torch.cat([kv.pos, new], -1), query_pos, self._windows[layer], hidden)
        return args, {**kwargs, "attention_mask": view.sees()}

    def _check_view(self, attention: Attention, view: View) -> None:
        """Refuse a layer whose last query sees other keys than our masks will show it.

        Raises:
            UnsupportedError: It does.
        """
        last = slice(attention.queries - 1, attention.queries)
        sees = view.part(last, slice(None)).sees().all(1, keepdim=True)
        shown = attention.shown_to_last()
        if shown is None:
            if bool((view.pos < 0).any()):
                return  # the model is not told of padding
            shown = torch.ones_like(sees)
        if bool((sees != shown).any()):
            raise UnsupportedError(
                f"layer {attention.layer} of {self.target.name} hides keys in another way than by the window of its "
                "configuration, which cache policies and attention observers go by: use another model",
                page="kv-session",
            )

    def _watchers_of(self, layer: int) -> list[Watcher]:
        return [watcher for watcher in self._watchers if watcher.layers is None or layer in watcher.layers]

    def _show_rows(
        self, watcher: Watcher, layer: int, view: View | None, query: Tensor | None, first: int, probs: Tensor
    ) -> None:
        """Show rows to a watcher; `query` are all queries of the call, of which `first` is the first of the rows."""
        call = self.now.call
        assert call is not None
        if query is not None and probs.shape[2] < query.shape[2]:
            query = query[:, :, first : first + probs.shape[2]]
        watcher.fn(AttentionRows(layer, first, probs, view, query, self.layer(layer), call))

    def _compute(self, attention: Attention) -> tuple[Tensor, Tensor | None] | None:
        """Compute a prompt's attention by a replacement, or attention to the rest of a cache; None for stock."""
        if self._prefill is not None and attention.query.shape[2] > 1:
            replaced = self._prefill(attention, self.layer(attention.layer))
            if replaced is not None:
                return replaced, None
        if not self.now.own_masks:
            return None
        if attention.complete:
            return attention.stock(None)[0], None
        return attention.under_view(), None

    def layer(self, layer: int) -> CacheLayer | None:
        """The layer's cache in this call; None if it is not a `CacheLayer`."""
        layers = getattr(self.now.cache, "layers", None)
        if not layers or layer >= len(layers):
            return None
        kv = layers[layer]
        return kv if isinstance(kv, CacheLayer) else None

    def _view_of(self, attention: Attention) -> View:
        """What the queries of this call see, of what an indexer chose if there is one."""
        view = self._view(attention.layer, attention.key)
        indices, blocks, call = attention.indices, attention.in_blocks, self.now.call
        assert call is not None
        seen = call.columns.shape[1]  # the place of what has no position
        if blocks is not None:
            place = torch.where(view.pos < 0, seen, view.pos)[:, :1, None].expand_as(blocks)
            chosen = blocks.new_zeros(*blocks.shape[:3], seen + 1)
            return replace(view, chosen=chosen.scatter_(-1, place, blocks))
        if indices is None:
            return view
        if getattr(attention.module, "indexer", None) is not None:  # others attend to what an earlier layer chose
            pos = view.pos[:, :1].expand(-1, indices.shape[1], -1).gather(-1, indices.long())
            chosen = torch.zeros(*indices.shape[:2], seen + 1, dtype=torch.bool, device=indices.device)
            self.now.chosen = chosen.scatter_(-1, torch.where(pos < 0, seen, pos), True)[:, None]
        return replace(view, chosen=self.now.chosen)

    def _view(self, layer: int, key: Tensor) -> View:
        """What the queries of this call see of `key` `[batch kv_head slot ...]`."""
        call = self.now.call
        assert call is not None
        query_pos = call.on(key.device)
        kv = self.layer(layer)
        window = self._windows[layer]
        if kv is not None:
            return View(kv.pos, query_pos, window, kv.hidden, call.columns.to(key.device))
        batch, kv_heads, slots = key.shape[:3]
        columns = call.columns[:, -slots:].to(key.device)
        # "batch slot -> batch kv_head slot" as a view: masks are then computed once for all heads.
        return View(columns[:, None].expand(batch, kv_heads, slots), query_pos, window, columns=columns)

    def _keep_queries(self, layer: int, query: Float[Tensor, "batch head query d_head"]) -> None:
        """Keep the latest queries of a layer, after rotary, if requested."""
        call = self.now.call
        if not self._queries_kept or call is None or self.now.cache is None:
            return
        if query.shape[2] == 1 and not self._keeps_decoding_queries and not self.now.prompting:
            return
        pos = call.on(query.device)
        count = self._queries_kept
        queries = self.state().queries
        earlier = queries.get(layer)
        if earlier is not None and query.shape[2] < count:
            query = torch.cat([earlier.query, query], 2)
            pos = torch.cat([earlier.pos.to(pos), pos], 1)
        queries[layer] = LatestQueries(query[:, :, -count:].detach(), pos[:, -count:])

    # On a TransformerBridge -------------------------------------------------------------------------------------

    def _bridge_hooks(self) -> list[tuple[Any, str, Any]]:
        """Do the same on a TransformerBridge, which computes attention itself: hook points mask scores and show rows.

        For some architectures (OPT) the bridge calls the wrapped model's attention. The tap has then seen it, and
        nothing is done here. A bridge builds the whole query x key matrix in every layer, so use the plain model for
        long contexts.
        """
        points = self.target.model.hook_dict
        hooks: list[tuple[Any, str, Any]] = []
        for layer in range(self.target.n_layers):
            attn = f"blocks.{layer}.attn"
            hooks.append((points[f"{attn}.hook_attn_scores"], "post", partial(self._mask_bridge_scores, layer)))
            hooks.append((points[f"{attn}.hook_pattern"], "post", partial(self._show_bridge_rows, layer)))
            # In models without rotary positions, the projection gives the queries that attend. Where rotary positions
            # are applied elsewhere (NeoX, Phi-3), neither hook fires, and `window_rows` says so.
            point = points.get(f"{attn}.hook_rot_q")
            if point is None and self.target.adapter.absolute_positions:
                point = points.get(f"{attn}.q.hook_out")
            if point is not None:
                hooks.append((point, "post", partial(self._note_bridge_query, layer)))
        return hooks

    def _note_bridge_query(self, layer: int, _module: Any, _args: Any, _kwargs: Any, query: Tensor) -> None:
        if self.now.call is None:
            return
        if query.ndim == 3:  # a projection
            query = rearrange(query, "batch pos (head d_head) -> batch head pos d_head", head=self.target.n_heads)
        self.now.bridge_queries[layer] = query  # kept only if scores follow, which are those of the bridge

    def _mask_bridge_scores(
        self, layer: int, _module: Any, _args: Any, _kwargs: Any, scores: Float[Tensor, "batch head query slot"]
    ) -> Tensor | None:
        if self.now.call is None:
            return None
        query = self.now.bridge_queries.pop(layer, None)
        if query is not None:
            self._keep_queries(layer, query)
        kv = self.layer(layer)
        if kv is None:
            return None
        visible = widened(self._view(layer, kv.pos).sees(), scores.shape[1])
        return torch.where(visible, scores, torch.finfo(scores.dtype).min)

    def _show_bridge_rows(
        self, layer: int, _module: Any, _args: Any, _kwargs: Any, pattern: Float[Tensor, "batch head query slot"]
    ) -> None:
        watchers = self._watchers_of(layer)
        if self.now.call is None or not watchers or layer in self.now.tapped_layers:
            return
        like_keys = rearrange(pattern[:, : self.target.n_kv_heads, 0], "batch kv_head slot -> batch kv_head slot 1")
        view = self._view(layer, like_keys)
        for watcher in watchers:
            first = watcher.first_query(pattern.shape[2])
            self._show_rows(watcher, layer, view, None, first, pattern[:, :, first:].float())

    # What the model calls ---------------------------------------------------------------------------------------

    def _begin(self, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        call = self.run.call
        if call is None:
            return None
        name = attention_name(self._config)
        if name != NAME and self.target.adapter.attention_interface:
            raise UnsupportedError(
                f"the attention of {self.target.name} was set to {name!r} inside the `with`, which would go past what "
                "acts here: set it before the `with`",
                page="kv-session",
            )
        cache = kwargs.get("past_key_values")
        use_cache = kwargs.get("use_cache")
        if use_cache is None:
            use_cache = getattr(self.target.config, "use_cache", True)
        if cache is None and use_cache:
            cache = new_cache(self.target)
        self.now.cache = cache
        own_masks = False
        if cache is not None:
            kwargs = {**kwargs, "past_key_values": cache}
            if call.past == 0:  # the cache is new or was emptied
                self._states.pop(cache, None)
            if self.owns_cache:
                own_masks = self._begin_on_own_cache(call, cache, kwargs)
        self._enter_call(call, cache, own_masks)
        return args, kwargs

    def _begin_on_own_cache(self, call: Call, cache: Any, kwargs: dict[str, Any]) -> bool:
        """Act before a call, and give new tokens their positions; whether our masks replace the stock mask."""
        layers: list[CacheLayer] = []
        if cache in self._states:
            layers = own_layers(cache)
        if not layers:
            adopt(cache, self.target, call.columns[:, : call.past])
            layers = own_layers(cache)
        if not self.target.adapter.attention_interface and kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = (call.columns >= 0).long()  # position biases are as long as this
        state = self.state()
        self._act_before(layers, call, state)
        if layers[0].rebased:  # new tokens follow closely
            held = (layers[0].pos[:, 0] >= 0).sum(-1)
            state.dropped = call.before - held.to(call.before.device)
            position_ids = kwargs.get("position_ids")
            if position_ids is None:
                position_ids = torch.arange(call.past, call.columns.shape[1], device=call.index.device)[None]
            kwargs["position_ids"] = (position_ids - state.dropped[:, None]).clamp(min=0)
        own_masks = self.target.kind == "bridge"
        for layer in layers:
            own_masks = own_masks or layer.edited
        return own_masks

    def _act_before(self, layers: list[CacheLayer], call: Call, state: CacheState) -> None:
        if call.index.shape[1] > 1 or call.past == 0 or self.now.prompting:
            state.prefilling = True
            state.reorders = layers[0].reorders
            self._acted = bool(self._acted) or self.now.prompting
            for kv in layers:  # a prompt sees everything
                kv.settle()
            return
        if self.followers and layers[0].reorders != state.reorders:
            raise UnsupportedError(
                f"beam search lets rows change places, and {self.followers[0]} follows each row: use num_beams=1",
                page="kv-session",
            )
        # If others filled the cache, or its rows were multiplied, it counts as a prompt that has just ended.
        prompt_known = state.prompt is not None and len(state.prompt) == len(call.index)
        prefill_ended = state.prefilling or not prompt_known
        state.prefilling = False
        if prefill_ended:
            state.prompt = call.before
            state.decoded = 0
            state.padded = bool((call.columns < 0).any())
            for kv in layers:
                kv.whole = kv.whole or not (state.padded or kv.edited)
        else:
            state.decoded += 1
        self._acted = True
        if self._before_decode:
            moment = Moment(self.now.cache, layers, call, state, prefill_ended)
            for act in self._before_decode:
                act(moment)

    def _end(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        call, cache = self.now.call, self.now.cache
        try:
            if call is None or output is None or cache is None:
                return
            if self.owns_cache:
                state = self.state()
                layers = own_layers(cache)
                self.now.ended = Moment(cache, layers, call, state, prefill_ended=False)
                for act in self._after_call:
                    act(self.now.ended)
                state.meter.note(layers, self.counts_reads and not state.prefilling)
        finally:
            self._leave_call()

    def _enter_call(self, call: Call, cache: Any, own_masks: bool) -> None:
        self.now.call = call
        self.now.cache = cache
        self.now.own_masks = own_masks
        self.now.tapped_layers = set()
        self.now.bridge_queries = {}
        COLUMNS.set(call.columns)
        idle = not self._needs_attention(call, own_masks)
        self.now.handler = Handler(self._see, self._configs, masks=own_masks, idle=idle)
        listen(self.now.handler)

    def _needs_attention(self, call: Call, own_masks: bool) -> bool:
        """Whether the attention of this call has to be seen. If not, the model computes it alone, in less time."""
        if self._watchers or self.target.kind == "bridge" or self._keeps_decoding_queries:
            return True
        if call.index.shape[1] > 1 or self.now.prompting:
            return True
        if not own_masks:
            return False
        for kv in own_layers(self.now.cache):
            if self._windows[kv.number] is not None or not kv.complete or kv.keys.dtype != kv.values.dtype:
                return True
        return False

    def _leave_call(self) -> None:
        self.now.call = None
        self.now.cache = None
        self.now.own_masks = False
        COLUMNS.set(None)
        if self.now.handler is not None:
            leave(self.now.handler)
            self.now.handler = None

    def state(self) -> CacheState:
        """What is known about the cache of this call."""
        cache = self.now.cache
        if cache not in self._states:
            state = CacheState()
            self._states[cache] = state
            self._meters.append(state.meter)
        return self._states[cache]

    def _set_prompting(self, reads: bool) -> None:
        self.now.prompting = reads and not self.resuming

    def _check_generate(self, method: str, options: dict[str, Any], settings: Any) -> None:
        """Note the settings of `generate`, and refuse kinds in which nothing could act on generated tokens.

        Raises:
            UnsupportedError: Generation is assisted, or runs without a cache.
        """
        self.now.settings = settings
        if not self._before_decode and not self.followers:
            return
        if method != "_prefill":
            raise UnsupportedError(
                "assisted generation reads several tokens at a time and takes some back, and a cache policy acts on "
                "tokens that come one by one: generate without an assistant, or use Full",
                page="kv-session",
            )
        if not options.get("use_cache") and options.get("past_key_values") is None:
            raise UnsupportedError(
                "use_cache=False: there is no cache that a cache policy or a guard could act on: generate with "
                "use_cache=True, or without them",
                page="kv-session",
            )


def layer_window(target: Target, layer: int) -> int | None:
    """Sliding window of a layer, in tokens; None if the layer sees everything."""
    config = target.config
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "gpt_neo":
        window, kinds = config.window_size, config.attention_layers
    if not window:
        return None
    if kinds is not None and kinds[layer] == "chunked_attention":
        return ChunkWindow(config.attention_chunk_size)
    if kinds is not None and kinds[layer] not in ("sliding_attention", "local"):
        return None
    return int(window)


@dataclass(frozen=True)
class Observe(Intervention):
    """Show attention rows to a function; no full query x key matrix is stored.

    In a single-token call, the output of a watched layer is computed from the rows that are shown, and equals the stock
    output up to rounding. In other calls, the model's own attention computes the output.

    Attributes:
        fn: Called with `AttentionRows`, one chunk of queries at a time.
        layers: Layers to watch. None watches all.
        last: How many of the last queries of each call to watch. None watches all.

    Example:
        >>> seen = []
        >>> watcher = Observe(lambda rows: seen.append(rows.probs.sum(-1)), layers=[0], last=1)
    """

    fn: Callable[[AttentionRows], None]
    layers: Sequence[int] | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        check_values(Natural | None, last=self.last)

    def enter(self, run: Run, key: int) -> None:
        """Watch."""
        layers = None if self.layers is None else run.target.chosen_layers(self.layers)
        Session.of(run).watch(self._show, layers, self.last)

    def _show(self, rows: AttentionRows) -> None:
        _ = rows.pos  # as it is now, because the function may keep the rows
        self.fn(rows)
