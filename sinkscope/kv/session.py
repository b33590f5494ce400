"""A run's hold on caches: takes them over, and calls policies and observers at the right moments.

A session does only what is requested. Without a policy, the caller's cache is left unchanged; without an observer, no
attention rows are built. What is seen of the attention is in `attention_watch`, what is known of a cache in
`cache_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.errors import UnsupportedError, warn
from sinkscope.hooks.edit.base import Run
from sinkscope.hooks.edit.positions import Call
from sinkscope.kv.adopt import own_layers, taken_over, used_cache, used_layers
from sinkscope.kv.attention_rows import AttentionRows, Watcher
from sinkscope.kv.attention_watch import AttentionWatch
from sinkscope.kv.cache import COLUMNS, CacheLayer
from sinkscope.kv.cache_state import CacheState, CurrentCall, Moment
from sinkscope.kv.latest_queries import unseen_queries
from sinkscope.kv.usage import Meter, Usage
from sinkscope.kv.windows import check_attention, check_generation, check_servable
from sinkscope.models.call_cache import by_name, with_cache
from sinkscope.tap.call import Attention
from sinkscope.tap.internals import following_generate
from sinkscope.tap.listeners import Handler, leave, listen
from sinkscope.tap.tap import tapped

_OWNERS: WeakValueDictionary[int, Session] = WeakValueDictionary()
"""The session whose policy or guard acts on the cache or attention of a model, by the id of the model."""


class Session:
    """Shared by all policies and observers of a run; created by the first that asks for it (`Session.of(run)`).

    Attributes:
        now: What the current thread is doing.
        watching: What is seen of the attention, and what replaces it.
        guests: What policies, guards and observers keep for the run, by its class.
        meters: Counters of tokens and bytes, one for each cache, also of caches that are gone.
    """

    def __init__(self, run: Run) -> None:
        target = run.target
        check_servable(target)
        self.run = run
        self.target = target
        self._config = target.config
        self.now = CurrentCall()
        self.watching = AttentionWatch(target, self.now)
        self.guests: dict[type, Any] = {}
        self._states: WeakKeyDictionary[Any, CacheState] = WeakKeyDictionary()
        self.meters: list[Meter] = []
        self._counts_reads = False
        self._policy_name: str | None = None
        self._acted: bool | None = None  # False: the model was called, but never to decode, nor by `generate`
        self._before_decode: list[Callable[[Moment], None]] = []
        self._after_call: list[Callable[[Moment], None]] = []
        self._configs = run.stack.enter_context(tapped(target))
        run.stack.callback(setattr, self.now, "ended", None)  # else the latest cache lives until the next collection
        run.stack.callback(self._leave_call)  # after Ctrl-C no hook has run
        run.stack.push(self._warn_of_idle_policy)
        run.hook((target.base, "pre", self._begin), (target.base, "always", self._end))
        for layer in range(target.n_layers):
            if not target.has_attention(layer):
                continue
            run.edited.keep(target.sub(layer, "attn"))

    @classmethod
    def of(cls, run: Run) -> Session:
        """The session of a run."""
        if run.session is None:
            run.session = cls(run)
        return run.session

    # What policies and observers ask for ------------------------------------------------------------------------

    def own_cache(self, policy: str | None = None) -> None:
        """Replace the layers of the caches in use by ours, which can evict and count slots.

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
        if not self.watching.owns_cache:
            self._own_model()
            self.watching.owns_cache = True
            self.run.stack.callback(self._settle)
            self.run.stack.enter_context(following_generate(self.target.hf, self._set_prompting, self._check_generate))

    def watch(
        self,
        fn: Callable[[AttentionRows], None],
        layers: list[int] | None = None,
        last: int | None = None,
        joins: bool = False,
    ) -> None:
        """Show `fn` the attention rows of `layers` and of the `last` queries in every call; None means all.

        With `joins`, it sees the rows of a generated token after the call, those of all layers as the rows of one if
        they can be joined; numbers that it keeps for each slot are then those of all layers, too.
        """
        self.watching.watchers.append(Watcher(fn, layers, last, joins))

    def window_queries(self, last: int, decoding: bool = False) -> None:
        """Keep the `last` queries of prompts for `window_rows`; with `decoding`, also those of generated tokens."""
        watching = self.watching
        watching.queries_kept = max(watching.queries_kept, last)
        watching.keeps_decoding_queries = watching.keeps_decoding_queries or decoding

    def window_rows(self, moment: Moment, layer: int, last: int) -> Float[Tensor, "batch head query slot"]:
        """Recompute, in float32, the attention of the last queries to everything in the cache."""
        if layer not in moment.state.queries:
            raise unseen_queries()
        return moment.state.queries[layer].rows(moment.cache.layers[layer], moment.call, last)

    def before_decode(self, fn: Callable[[Moment], None]) -> None:
        """Call `fn` before every call that reads a single generated token."""
        self._before_decode.append(fn)

    def count_reads(self) -> None:
        """Let `usage` also count the tokens that decoding steps attend to."""
        self._counts_reads = True

    def replace_prefill(self, fn: Callable[[Attention, CacheLayer | None], Tensor | None]) -> None:
        """Let `fn` compute attention `[batch query head d_value]` in calls with several tokens.

        It is called with the attention, whose `view` is known, and with the layer's cache if that is a `CacheLayer`.
        If it returns None, the model's own attention is used.
        """
        self._own_model()
        self.watching.replacement = fn

    def after_call(self, fn: Callable[[Moment], None]) -> None:
        """Call `fn` after every call whose cache consists of `CacheLayer`s."""
        self._after_call.append(fn)

    @property
    def usage(self) -> list[Usage]:
        """Tokens and bytes of every cache of the run; of a model that is split, the bytes of all processes."""
        kv_heads = self.target.n_kv_heads if self.target.shards.size > 1 else None
        return [meter.usage(kv_heads) for meter in self.meters if meter.calls]

    def _warn_of_idle_policy(self, error: type[BaseException] | None, *_: Any) -> None:
        """Warn that nothing was measured, if the model ran and the policy of a run never came to act."""
        if error is None and self._acted is False and self._before_decode and self.watching.replacement is None:
            warn(
                f"{self._policy_name or 'the intervention'} never acted: it acts when a generated token follows a "
                "prompt, and only prompts were read, so all results are those of the full cache; generate, or feed "
                "tokens one by one with a cache"
            )

    def _settle(self) -> None:
        """Leave whole caches behind."""
        for cache in list(self._states):
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

    # What the model calls ---------------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self._leave_call()  # the latest one if it was interrupted, after which torch runs no hook
        self.now.ended = None  # so that its cache is not kept beside that of this call
        if self.run.call is None:
            return None
        self.now.following = self._follow(self.run.call, module, by_name(module, args, kwargs))
        return (), next(self.now.following)

    def _end(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if self.now.following is not None and output is not None:
            next(self.now.following, None)
        self._leave_call()

    def _leave_call(self) -> None:
        if self.now.following is not None:
            self.now.following.close()
            self.now.following = None

    def _follow(self, call: Call, module: nn.Module, kwargs: dict[str, Any]) -> Generator[dict[str, Any]]:
        """Follow a forward call, in the order in which all come to act; yields its arguments for the model to run.

        The cache is taken over; policies and guards act on it (`before_decode`); the model runs, in every layer of
        which `CacheLayer.update` appends the new tokens and the tap shows the attention to `AttentionWatch.see`, which
        computes it if the cache lacks tokens, and shows rows to policies and observers; guards and observers look at
        what came out (`after_call`); and what the cache holds is counted.
        """
        now = self.now
        check_attention(self.target, self._config)
        cache = used_cache(kwargs, self.target, is_watched=bool(self.watching.watchers))
        handler: Handler | None = None
        state: CacheState | None = None
        try:
            now.cache = cache
            layers = list[CacheLayer]()
            if cache is not None:
                kwargs = with_cache(module, kwargs, cache)
                is_known = call.past > 0 and cache in self._states  # else it is new, or was emptied
                if self.watching.owns_cache:
                    layers = taken_over(cache, call, kwargs, self.target, is_known=is_known)
                if not is_known:
                    self._states[cache] = CacheState()
                    self.meters.append(self._states[cache].meter)
                now.state = state = self._states[cache]
                if layers:
                    self._act_before(layers, call, state)
                    now.own_masks = any([layer.known is not None for layer in layers])
            now.call = call
            COLUMNS.set(call.tokens)
            handler = self.watching.handler(call, layers, self._configs)
            listen(handler)
            try:
                yield kwargs
            finally:  # layers that ran before an interruption hold the new tokens already
                if state is not None and self.watching.owns_cache:
                    self.watching.show_joined()
            if state is not None and self.watching.owns_cache:
                now.ended = Moment(cache, used_layers(cache), call, state, prefill_ended=False)
                for act in self._after_call:
                    act(now.ended)
                state.meter.note(now.ended.layers, self._counts_reads and not state.prefilling)
        finally:
            now.call = None
            now.cache = None
            now.state = None
            now.own_masks = False
            now.watched = []
            COLUMNS.set(None)
            if handler is not None:
                leave(handler)

    def _act_before(self, layers: list[CacheLayer], call: Call, state: CacheState) -> None:
        if call.new > 1 or call.past == 0 or self.now.prompting:
            state.prefilling = True
            self._acted = bool(self._acted) or self.now.prompting
            for kv in layers:  # a prompt sees everything
                kv.settle()
                kv.reordered = False
            return
        # If others filled the cache, or its rows were multiplied, it counts as a prompt that has just ended.
        prompt_known = state.prompt is not None and state.prompt.shape[0] == call.rows
        prefill_ended = state.prefilling or not prompt_known
        state.prefilling = False
        if prefill_ended:
            state.prompt = call.before
            state.decoded = 0
        else:
            state.decoded += 1
        self._acted = True
        if self._before_decode:
            moment = Moment(self.now.cache, layers, call, state, prefill_ended)
            for act in self._before_decode:
                act(moment)

    def _set_prompting(self, reads: bool) -> None:
        self.now.prompting = reads and not self.now.resuming

    def _check_generate(self, method: str, options: dict[str, Any], settings: Any) -> None:
        """Note the settings of `generate`, and refuse kinds in which nothing could act on generated tokens."""
        self.now.settings = settings
        if self._before_decode:
            check_generation(method, options)
