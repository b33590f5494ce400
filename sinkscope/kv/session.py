"""A run's hold on caches: takes them over, and calls policies and observers at the right moments.

A session does only what is requested. Without a policy, the caller's cache is left unchanged; without an observer, no
attention rows are built. What is seen of the attention is in `attention_watch`, what is known of a cache in
`cache_state`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from torch import Tensor, nn

from sinkscope.errors import UnsupportedError, warn
from sinkscope.hooks.edit.base import Run
from sinkscope.hooks.edit.positions import Call
from sinkscope.kv.adopt import own_layers, taken_over, used_cache
from sinkscope.kv.attention_rows import AttentionRows, Watcher
from sinkscope.kv.attention_watch import AttentionWatch
from sinkscope.kv.cache import COLUMNS, CacheLayer
from sinkscope.kv.cache_state import CacheState, CurrentCall, Moment
from sinkscope.kv.generation import Generation
from sinkscope.kv.rewind import Rewinder
from sinkscope.kv.usage import Meter, Usage
from sinkscope.kv.windows import check_attention, check_servable
from sinkscope.models.call_cache import with_cache
from sinkscope.models.hooks import AroundCall, Kwargs
from sinkscope.tap.call import Attention
from sinkscope.tap.internals import following_generate
from sinkscope.tap.tap import tapped

_ACTING: WeakValueDictionary[int, Run] = WeakValueDictionary()
"""The run that acts on the cache and the attention of a model, by the id of the model; others may watch."""


class Session:
    """The state that all policies and observers of a run share; `Session.of(run)` makes it when first asked.

    Attributes:
        now: What the current thread is doing.
        watching: What is seen of the attention, and what replaces it.
        generation: What `generate` is doing in the current thread.
        anchors: Number of first positions that the policies and guards of the run keep.
        rewinder: Passes on what a guard removes from the output; None if no guard does.
        meters: Counters of tokens and bytes, one for each cache, also of caches that are gone.
    """

    def __init__(self, run: Run) -> None:
        target = run.target
        check_servable(target)
        self._run = ref(run)  # which holds the session: no circle keeps what they hold in memory
        self.target = target
        self._config = target.config
        self.now = CurrentCall()
        self.watching = AttentionWatch(target, self.now)
        self.anchors = 0
        self.rewinder: Rewinder | None = None
        self._states: WeakKeyDictionary[Any, CacheState] = WeakKeyDictionary()
        self.meters: list[Meter] = []
        self._policy_name: str | None = None
        self._reader: str | None = None  # what decides how prompts are read
        self._acted: bool | None = None  # False: the model was called, but never to decode, nor by `generate`
        self._before_decode: list[Callable[[Moment], None]] = []
        self._after_call: list[Callable[[Moment], None]] = []
        self.generation = Generation(self._before_decode)
        run.stack.callback(self._leave)
        self._configs = run.stack.enter_context(tapped(target))
        run.stack.push(self._warn_of_idle_policy)
        for layer in range(target.n_layers):
            if not target.has_attention(layer):
                continue
            run.keep(target.sub(layer, "attn"))

    @classmethod
    def of(cls, run: Run) -> Session:
        """Return the session of a run."""
        if run.session is None:
            run.session = cls(run)
        return run.session

    @property
    def run(self) -> Run:
        """The run."""
        run = self._run()
        assert run is not None
        return run

    # What policies and observers ask for ------------------------------------------------------------------------

    def own_cache(self, policy: str | None = None, first: int = 0) -> None:
        """Replace the layers of the caches in use by ours, which can evict and count slots.

        Args:
            policy: Name of the policy that decides what the cache keeps, if one asks.
            first: Number of first positions that the policy or guard keeps, and that others are to keep, too.

        Raises:
            UnsupportedError: Another run on this model already does this, or another policy was entered before.
        """
        if policy is not None and self._policy_name is not None:
            raise UnsupportedError(
                f"{self._policy_name} and {policy} would both choose what the cache keeps: enter one of them"
            )
        self._policy_name = policy or self._policy_name
        self.anchors = max(self.anchors, first)
        if not self.watching.owns_cache:
            self._own_model()
            self.watching.owns_cache = True
            self.run.stack.callback(self._settle)
            generation = self.generation
            self.run.stack.enter_context(following_generate(self.target.hf, generation.set_prompting, generation.begin))

    def _own_model(self) -> None:
        """Let this run be the one that acts on its model, until it ends."""
        run = self.run
        model = id(run.target.hf)
        if _ACTING.setdefault(model, run) is not run:
            raise UnsupportedError(
                f"{run.target.name} is already inside a `with` that acts on its cache: enter them together, "
                "`(a | b).on(model)`"
            )
        run.stack.callback(_ACTING.pop, model, None)

    def watch(
        self,
        fn: Callable[[AttentionRows], None],
        layers: list[int] | None = None,
        last: int | None = None,
    ) -> None:
        """Show `fn` the attention rows of `layers` and of the `last` queries in every call; None means all."""
        self.watching.watchers.append(Watcher(fn, layers, last))

    def replace_prompts(self, name: str, compute: Callable[[Attention, CacheLayer | None], Tensor | None]) -> None:
        """Let `compute` give the attention of calls with several tokens (`AttentionWatch.replacement`).

        Raises:
            UnsupportedError: Another run on this model acts already, or another one in this run does the same.
        """
        self._own_model()
        if self._reader is not None:
            raise UnsupportedError(
                f"{self._reader} and {name} would both decide how prompts are read: enter one of them"
            )
        self._reader = name
        self.watching.replacement = compute

    def window_queries(self, last: int, decoding: bool = False) -> None:
        """Keep the `last` queries of prompts for `LayerMoment.window_rows`; with `decoding`, generated tokens too."""
        watching = self.watching
        watching.queries_kept = max(watching.queries_kept, last)
        watching.keeps_decoding_queries = watching.keeps_decoding_queries or decoding

    def before_decode(self, fn: Callable[[Moment], None]) -> None:
        """Call `fn` before every call that reads a single generated token."""
        self._before_decode.append(fn)

    def after_call(self, fn: Callable[[Moment], None]) -> None:
        """Call `fn` after every call whose cache consists of `CacheLayer`s."""
        self._after_call.append(fn)

    @property
    def usage(self) -> list[Usage]:
        """Tokens and bytes of every cache of the run; of a model that is split, the bytes of all processes."""
        kv_heads = self.target.n_kv_heads if self.target.shards.size > 1 else None
        return [meter.usage(kv_heads, self.watching.windows) for meter in self.meters if meter.calls]

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

    def _leave(self) -> None:
        """Forget who acted, because most of them hold the session."""
        for acting in (self._before_decode, self._after_call, self.watching.watchers):
            acting.clear()
        self.rewinder = None
        self.watching.replacement = None

    # What the model calls ---------------------------------------------------------------------------------------

    def follow(self, call: Call, module: nn.Module, kwargs: Kwargs) -> AroundCall:
        """Follow a forward call, in the order in which all come to act; its arguments are given by name.

        The cache is taken over; policies and guards act on it (`before_decode`); the model runs, in every layer of
        which `CacheLayer.update` appends the new tokens and the tap shows the attention to `AttentionWatch.see`, which
        computes it if the cache lacks tokens, and shows rows to policies and observers; guards and observers look at
        what came out (`after_call`); and what the cache holds is counted.
        """
        now, watching = self.now, self.watching
        check_attention(self.target, self._config)
        cache = used_cache(kwargs, self.target, is_seen=watching.is_seen)
        layers = list[CacheLayer]()
        try:
            if cache is not None:
                kwargs = with_cache(module, kwargs, cache)
                state = self._states.get(cache)
                is_known = call.past > 0 and state is not None  # else it is new, or was emptied
                if watching.owns_cache:
                    layers = taken_over(cache, call, kwargs, self.target, is_known=is_known)
                if state is None or not is_known:
                    self._states[cache] = state = CacheState(meter=Meter(watching.windows))
                    self.meters.append(state.meter)
                now.cache = cache
                now.state = state
                if layers:
                    self._act_before(layers, call, state)
                    now.own_masks = any([kv.edited for kv in layers])
            now.call = call
            COLUMNS.set(call.tokens)
            with watching.handler(call, layers, self._configs):
                output = yield (), kwargs
            if layers and now.state is not None:
                for act in self._after_call:
                    act(Moment(cache, layers, call, now.state, prefill_ended=False))
                now.state.note_held(layers)
            return output
        finally:
            now.end()
            COLUMNS.set(None)

    def _act_before(self, layers: list[CacheLayer], call: Call, state: CacheState) -> None:
        if call.new > 1 or call.past == 0 or self.generation.prompting:
            state.prefilling = True
            self._acted = bool(self._acted) or self.generation.prompting
            for kv in layers:  # a prompt sees everything
                kv.settle()
                kv.reordered = False
            return
        prefill_ended = state.prefilling or not state.prompt  # of a cache that others filled, too
        state.prefilling = False
        if prefill_ended:
            state.prompt = tuple(call.before.tolist())
            state.decoded = 0
        else:
            state.decoded += 1
        self._acted = True
        if self._before_decode:
            if layers[0].reordered:
                raise UnsupportedError(
                    "rows of the cache changed places or number after the prompt, as in beam search, and cache "
                    "policies and guards follow each row: use num_beams=1"
                )
            moment = Moment(self.now.cache, layers, call, state, prefill_ended)
            for act in self._before_decode:
                act(moment)
