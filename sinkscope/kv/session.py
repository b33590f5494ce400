"""A run's hold on caches: takes them over, and calls policies and observers at the right moments.

A session does only what is requested. Without a policy, the caller's cache is left unchanged; without an observer, no
attention rows are built. What is seen of the attention is in `attention_watch`, what is known of a cache in
`cache_state`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import nn

from sinkscope.engine.block import Run
from sinkscope.engine.internals import GenerateFollower, following_generate
from sinkscope.engine.step import Call
from sinkscope.engine.tap import check_attention_recomputed, check_masks_made, tapped
from sinkscope.errors import UnsupportedError, warn
from sinkscope.kv.adopt import adopt, check_seen, own_layers, used_cache
from sinkscope.kv.attention_watch import AttentionRows, AttentionWatch, Replacement, Watcher
from sinkscope.kv.cache import COLUMNS, CacheLayer
from sinkscope.kv.cache_state import CacheState, Generation, Moment
from sinkscope.kv.usage import Meter, Usage
from sinkscope.kv.windows import attention_elsewhere, check_mask, check_servable
from sinkscope.models.call_cache import cache_in, with_cache
from sinkscope.models.hooks import AroundCall, Kwargs
from sinkscope.models.target import Target

_ACTING: WeakKeyDictionary[nn.Module, list[Run]] = WeakKeyDictionary()
"""The runs that act on the cache and the attention of a model, one for each thread; others may watch."""
_LOCK = threading.Lock()


def _own_model(run: Run) -> list[Run]:
    """Let a run be the one that acts on its model in its thread, until it ends; all that act there, as they come."""
    with _LOCK:
        acting = _ACTING.setdefault(run.target.hf, [])
        if run in acting:
            return acting
        if any(other.thread == run.thread for other in acting):
            raise UnsupportedError(
                f"{run.target.name} is already inside a `with` that acts on its cache: enter them together, "
                "`(a | b).on(model)`"
            )
        acting.append(run)
    run.stack.callback(acting.remove, run)
    return acting


def _check_owned_once(target: Target, acting: list[Run]) -> None:
    """Refuse a call of a thread without a block on whose cache the runs of two other threads would act."""
    if sum(run.acts_here() for run in list(acting)) > 1:
        raise UnsupportedError(
            f"{target.name} is inside blocks of several threads that act on its cache, and this thread is in none: "
            "enter one here, too, or a single one around all threads"
        )


def _check_token_by_token(method: str, options: Mapping[str, Any]) -> None:
    """Refuse kinds of generation in which nothing could act on generated tokens.

    Args:
        method: The method of a model that `generate` calls: `_prefill`, or another for assisted generation.
        options: Arguments of the forward call.

    Raises:
        UnsupportedError: Generation is assisted, or runs without a cache.
    """
    if method != "_prefill":
        raise UnsupportedError(
            "assisted generation reads several tokens at a time and takes some back, and a cache policy acts on "
            "tokens that come one by one: generate without an assistant or prompt lookup, or use Full"
        )
    if not options.get("use_cache") and cache_in(options) is None:
        raise UnsupportedError(
            "use_cache=False: there is no cache that a cache policy or a guard could act on: generate with "
            "use_cache=True, or without them"
        )


def _never_acted(name: str) -> str:
    """The warning of a policy that was entered and changed nothing."""
    return (
        f"{name} never acted: it acts when a generated token follows a prompt, and only prompts were read, so all "
        "results are those of the full cache; generate, or feed tokens one by one with a cache"
    )


class Session:
    """The state that all policies and observers of a run share; `Session.of(run)` makes it when first asked.

    Attributes:
        watching: What is seen of the attention, and what replaces it.
        generation: What `generate` is doing in the current thread, and the call that ended last there.
        acts_on_tokens: Whether something acts on generated tokens.
        keeps_ended: Whether a guard asks for the call that ended last, whose logits come after it.
        anchors: Number of first positions that the policies and guards of the run keep.
        rewinder: Passes on what a guard removes from the output (`rewind.Rewinder`); None if no guard does.
        meters: Counters of tokens and bytes, one for each cache, also of caches that are gone.
    """

    def __init__(self, run: Run) -> None:
        self.target = target = run.target
        check_servable(target)
        self._run = ref(run)  # which holds the session: no circle keeps what they hold in memory
        self.watching = AttentionWatch(target)
        self.anchors = 0
        self.rewinder: Any = None
        self._caches: WeakSet[Any] = WeakSet()  # those that were used
        self._acting: list[Run] = []  # on the cache or the attention of the model, in all threads
        self.meters: list[Meter] = []
        self._policy_name: str | None = None
        self._reader: str | None = None  # what decides how prompts are read
        self._acted: bool | None = None  # False: the model was called, but never to decode, nor by `generate`
        self._before_decode: list[Callable[[Moment], None]] = []
        self._after_call: list[Callable[[Moment], None]] = []
        self.acts_on_tokens = False
        self.keeps_ended = False
        self.generation = Generation()
        run.stack.callback(self._leave)
        self._configs = run.stack.enter_context(tapped(target))
        run.stack.push(self._warn_of_idle_policy)
        for layer in target.attending:
            run.keep(target.sub(layer, "attn"))

    @classmethod
    def of(cls, run: Run) -> Session:
        """Return the session of a run."""
        session = cls.in_run(run)
        if session is None:
            run.session = session = cls(run)
        return session

    @classmethod
    def in_run(cls, run: Run | None) -> Session | None:
        """Return the session of a run; None if no policy, guard or observer is entered."""
        session = None if run is None else run.session
        return session if isinstance(session, Session) else None

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
            UnsupportedError: Another run of this thread on this model already does this, another policy was entered
                before, or no mask hides what is beyond a window.
        """
        if policy is not None and self._policy_name is not None:
            raise UnsupportedError(
                f"{self._policy_name} and {policy} would both choose what the cache keeps: enter one of them"
            )
        self._policy_name = policy or self._policy_name
        self.anchors = max(self.anchors, first)
        if not self.watching.owns_cache:
            if any(self.watching.windows):
                check_masks_made(self.target)
            self._acting = _own_model(self.run)
            self.watching.owns_cache = True
            self.run.stack.callback(self._settle)
            follower = GenerateFollower(self.run.acts_here, self._begin_generation, self.generation.set_prompting)
            self.run.stack.enter_context(following_generate(self.target.hf, follower))

    def _begin_generation(self, method: str, options: dict[str, Any], settings: Any) -> None:
        """Note the settings of `generate`, and refuse it if nothing could act on its tokens."""
        self.generation.settings = settings
        if self.acts_on_tokens:
            _check_token_by_token(method, options)

    def watch(
        self, fn: Callable[[AttentionRows], None], layers: list[int] | None = None, last: int | None = None
    ) -> None:
        """Show `fn` the attention rows of `layers` and of the `last` queries in every call; None means all."""
        check_attention_recomputed(self.target)
        self.watching.watchers.append(Watcher(fn, layers, last))

    def replace_prompts(self, name: str, compute: Replacement) -> None:
        """Let `compute` give the attention of calls with several tokens (`AttentionWatch.replacement`).

        Raises:
            UnsupportedError: Another run of this thread on this model acts already, or another one in this run does the
                same.
        """
        check_attention_recomputed(self.target)
        self._acting = _own_model(self.run)
        if self._reader is not None:
            raise UnsupportedError(
                f"{self._reader} and {name} would both decide how prompts are read: enter one of them"
            )
        self._reader = name
        self.watching.replacement = compute

    def window_queries(self, last: int, decoding: bool = False) -> None:
        """Keep the `last` queries of prompts for `LayerMoment.window_rows`; with `decoding`, generated tokens too."""
        check_attention_recomputed(self.target)
        self.watching.queries_kept = max(self.watching.queries_kept, last)
        self.watching.keeps_decoding_queries |= decoding

    def before_decode(self, fn: Callable[[Moment], None] | None = None) -> None:
        """Call `fn`, if there is one, before every call that reads a single generated token.

        Tokens then have to come one by one, in rows that keep their places.
        """
        self.acts_on_tokens = True
        if fn is not None:
            self._before_decode.append(fn)

    def after_call(self, fn: Callable[[Moment], None]) -> None:
        """Call `fn` after every call whose cache consists of `CacheLayer`s."""
        self._after_call.append(fn)

    @property
    def usage(self) -> list[Usage]:
        """Tokens and bytes of every cache of the run; of a model that is split, the bytes of all processes."""
        kv_heads = self.target.n_kv_heads if self.target.processes > 1 else None
        return [meter.usage(kv_heads) for meter in self.meters if meter.calls]

    def _warn_of_idle_policy(self, error: type[BaseException] | None, *_: Any) -> None:
        """Warn that nothing was measured, if the model ran and the policy of a run never came to act."""
        if error is None and self._acted is False and self.acts_on_tokens and self.watching.replacement is None:
            warn(_never_acted(self._policy_name or "the intervention"))

    def _settle(self) -> None:
        """Leave whole caches behind."""
        for cache in list(self._caches):
            for kv in own_layers(cache):
                kv.settle()

    def _leave(self) -> None:
        """Forget who acted, because most of them hold the session."""
        for acting in (self._before_decode, self._after_call, self.watching.watchers):
            acting.clear()
        self.rewinder = None
        self.watching.replacement = None

    # What the model calls ---------------------------------------------------------------------------------------

    def follow(self, call: Call, module: nn.Module, given: Kwargs) -> AroundCall:
        """Follow a forward call, in the order in which all come to act; its arguments are given by name.

        The cache is taken over; policies and guards act on it (`before_decode`); the model runs, in every layer of
        which `CacheLayer.update` appends the new tokens and the tap shows the attention to `AttentionWatch.see`, which
        computes it if the cache lacks tokens, and shows rows to policies and observers; guards and observers look at
        what came out (`after_call`); and what the cache holds is counted.
        """
        if len(self._acting) > 1:
            _check_owned_once(self.target, self._acting)
        cache, changed = call.cache, None
        if cache is None:
            cache = used_cache(given, self.target)
            if cache is not None:
                changed = (), with_cache(module, given, cache)
                self.run.know_rows(cache, call.state)
        state, layers = self._taken_over(cache, call), list[CacheLayer]()
        if cache is not None and self.watching.owns_cache:
            for layer in cache.layers:
                if isinstance(layer, CacheLayer):
                    layers.append(layer)
            if call.past and call.new > 1:
                check_mask(given.get("attention_mask"), call, self.target)
        moment = Moment(cache, layers, call, state, False)
        if layers:
            moment = self._act_before(moment)
        COLUMNS.set(call.tokens)
        try:
            with self.watching.handler(moment, self._configs) as handler:
                yield changed
            if not handler.was_reached:
                raise attention_elsewhere(self.target)
        finally:
            COLUMNS.set(None)
        if layers:
            for act in self._after_call:
                act(moment)
            state.meter.note(layers, decodes=not state.prefilling, queries=state.queries)
            if self.keeps_ended:
                self.generation.ended = moment

    def _taken_over(self, cache: Any, call: Call) -> CacheState:
        """What is known of the cache of a call; its layers are ours from the first call on, if the run owns caches."""
        state = call.state.of_cache
        if not isinstance(state, CacheState):
            state = CacheState(meter=Meter(self.watching.windows))
            if cache is None:
                return state
            check_seen(cache, is_seen=self.watching.is_seen)
            if self.watching.owns_cache:
                adopt(cache, self.target, call.earlier)
            call.state.of_cache = state
        if cache not in self._caches:  # a new one, or a copy
            self._caches.add(cache)
            self.meters.append(state.meter)
        return state

    def _act_before(self, moment: Moment) -> Moment:
        """Let policies and guards act before a generated token; a prompt sees everything. The moment as it then is."""
        call, state, layers = moment.call, moment.state, moment.layers
        if call.new > 1 or call.past == 0 or self.generation.prompting:
            state.prefilling = True
            self._acted = bool(self._acted) or self.generation.prompting
            for kv in layers:
                kv.settle()
                kv.reordered = False
            return moment
        prefill_ended = state.prefilling or not state.prompt  # of a cache that others filled, too
        state.prefilling = False
        self._acted = True
        if prefill_ended:
            state.prompt = tuple(call.before.tolist())
            state.decoded = 0
        else:
            state.decoded += 1
        if self.acts_on_tokens:
            if layers[0].reordered:
                raise UnsupportedError(
                    "rows of the cache changed places or number after the prompt, as in beam search, and cache "
                    "policies and guards follow each row: use num_beams=1"
                )
            if prefill_ended:
                moment = replace(moment, prefill_ended=True)
            for act in self._before_decode:
                act(moment)
        return moment
