"""Who keeps the caches of a block: it takes them over, says when a prompt has ended, and counts what they hold.

`CacheKeeper.of(run)` is the keeper of a block, made when the first policy or guard asks. It is the first of the block's
actors, so the others find in each `Step` the layers that can evict and whether the call decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

from jaxtyping import Int
from torch import Tensor

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import Attention
from sinkscope.engine.rows import RowState
from sinkscope.engine.run import Run, check_generation, runs_here
from sinkscope.engine.step import Step, TakeBack
from sinkscope.engine.visible import FunctionMask, TensorMask
from sinkscope.errors import UnsupportedError, warn
from sinkscope.kv.adopt import adopt, own_layers
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.latest_queries import LatestQueries, QueryKeeper
from sinkscope.kv.usage import Meter, Usage
from sinkscope.kv.windows import check_mask, check_servable
from sinkscope.models.windows import layer_window

_METER = "meter"


@dataclass(eq=False)
class CountedRows:
    """The counter of a cache, which stays with it whatever its rows do."""

    meter: Meter

    def take(self, rows: Int[Tensor, " row"]) -> CountedRows:
        """Return itself."""
        return self


class CacheKeeper(Actor):
    """Keeps the caches of a block.

    Attributes:
        target: The model.
        windows: Sliding window of each layer; None where it sees everything.
        anchors: Number of first positions that the policies and guards of the block keep.
        acts_on_tokens: Whether something acts on generated tokens, which then have to come one by one.
        meters: Counters of tokens and bytes, one for each cache, also of caches that are gone.
    """

    reads_logits = False

    def __init__(self, run: Run) -> None:
        self.target = run.target
        self.windows = [layer_window(run.target.config, layer) for layer in range(run.target.n_layers)]
        self.anchors = 0
        self.acts_on_tokens = False
        self.meters: list[Meter] = []
        self._queries: QueryKeeper | None = None
        self._policy_name: str | None = None
        self._caches: WeakSet[Any] = WeakSet()  # those that were used
        self._acted: bool | None = None  # False: the model was called, but never to decode, nor by `generate`

    @classmethod
    def of(cls, run: Run, policy: str | None = None, first: int = 0) -> CacheKeeper:
        """Return the keeper of a block, which from now on replaces the layers of the caches in use by ours.

        Args:
            run: The block.
            policy: Name of the policy that decides what the cache keeps, if one asks.
            first: Number of first positions that the policy or guard keeps, and that others are to keep, too.

        Raises:
            UnsupportedError: An outer block acts on the cache of this model already, or another policy was entered
                before.
        """
        keeper = cls.in_run(run)
        if keeper is None:
            keeper = cls._enter(run)
        if policy is not None and keeper._policy_name is not None:
            raise UnsupportedError(
                f"{keeper._policy_name} and {policy} would both choose what the cache keeps: enter one of them"
            )
        keeper._policy_name = policy or keeper._policy_name
        keeper.anchors = max(keeper.anchors, first)
        return keeper

    @classmethod
    def in_run(cls, run: Run | None) -> CacheKeeper | None:
        """Return the keeper of a block; None if nothing acts on its caches."""
        if run is not None:
            for actor in run.actors:
                if isinstance(actor, CacheKeeper):
                    return actor
        return None

    @classmethod
    def _enter(cls, run: Run) -> CacheKeeper:
        check_servable(run.target)
        own_attention(run)
        keeper = cls(run)
        run.stack.callback(keeper._settle)
        run.stack.push(keeper._warn_if_idle)
        run.check_generate(keeper._check_generation)
        run.act(keeper, first=True)  # others find what it says in the record of the call
        return keeper

    def watch_decoding(self) -> None:
        """Ask that tokens come one by one, in rows that keep their places."""
        self.acts_on_tokens = True

    def window_queries(self, run: Run, last: int, decoding: bool = False) -> None:
        """Keep the `last` queries of prompts for `LayerMoment.window_rows`; with `decoding`, generated tokens too."""
        if self._queries is None:
            self._queries = QueryKeeper()
            run.act(self._queries)
        self._queries.count = max(self._queries.count, last)
        self._queries.keeps_decoding |= decoding

    def _check_generation(self, method: str, options: Mapping[str, Any], _settings: Any) -> None:
        if self.acts_on_tokens:
            one_by_one = "a cache policy acts on tokens that come one by one (Full does not)"
            no_cache = "there is no cache that a cache policy or a guard could act on"
            check_generation(method, options, assisted=one_by_one, uncached=no_cache)

    @property
    def usage(self) -> list[Usage]:
        """Tokens and bytes of every cache of the block; of a model that is split, the bytes of all processes."""
        kv_heads = self.target.n_kv_heads if self.target.processes > 1 else None
        return [meter.usage(kv_heads) for meter in self.meters if meter.calls]

    def _warn_if_idle(self, error: type[BaseException] | None, *_: Any) -> None:
        """Warn that nothing was measured, if the model ran and the policy never came to act."""
        if error is None and self._acted is False and self.acts_on_tokens:
            name = self._policy_name or "the intervention"
            warn(
                f"{name} never acted: it acts when a generated token follows a prompt, and only prompts were read, so "
                "all results are those of the full cache; generate, or feed tokens one by one with a cache"
            )

    def _settle(self) -> None:
        """Leave whole caches behind."""
        for cache in list(self._caches):
            for kv in own_layers(cache):
                kv.settle()

    # What the block calls -------------------------------------------------------------------------------------------

    def before(self, step: Step) -> None:
        """Take the cache of a call over, and say whether the call decodes."""
        cache, state = step.cache, step.state
        if cache is None:
            return
        counted = state.known.get(_METER)
        if not isinstance(counted, CountedRows):
            adopt(cache, self.target, step.earlier)
            state.known[_METER] = counted = CountedRows(Meter(self.windows))
        if cache not in self._caches:  # a new one, or a copy
            self._caches.add(cache)
            self.meters.append(counted.meter)
        tokens, layers = step.tokens, step.layers
        for kv in cache.layers:  # a plain loop: every token comes here
            if isinstance(kv, CacheLayer):
                kv.upcoming = tokens
                layers.append(kv)
        if not layers:
            return
        if step.new == 1 and step.past and not step.prompting:
            self._begin_decoding(step)
        else:
            if step.past and step.new > 1:
                check_mask(step.arguments.get("attention_mask"), step, self.target)
            state.prefilling = True
            self._acted = bool(self._acted) or step.prompting
            for kv in layers:
                kv.settle()
                kv.reordered = False

    def _begin_decoding(self, step: Step) -> None:
        state = step.state
        step.decodes = self._acted = True
        step.prefill_ended = state.prefilling or not state.prompt  # of a cache that others filled, too
        state.prefilling = False
        state.decoded += 1
        if step.prefill_ended:
            state.prompt = tuple(step.before.tolist())
            state.decoded = 0
        if not self.acts_on_tokens:
            return
        if step.layers[0].reordered:
            raise UnsupportedError(
                "rows of the cache changed places or number after the prompt, as in beam search, and cache "
                "policies and guards follow each row: use num_beams=1"
            )
        if step.prefill_ended:
            self._check_ends(step)

    def _check_ends(self, step: Step) -> None:
        """Refuse rows that end with padding, where their last query is none of theirs."""
        ends = step.earlier.pos[:, -1:]
        if bool((ends < 0).any()):
            raise UnsupportedError(
                f"rows of this batch are padded on the right, where {self.target.name} would write on: cache "
                "policies and guards need padding on the left (tokenizer.padding_side = 'left')"
            )

    def attends(self, step: Step) -> bool:
        """Return whether the model's own attention would not see right what is left in the cache."""
        has_gaps = is_ragged = False
        for kv in step.layers:  # a plain loop: every token comes here
            if kv.slot_positions is not None:
                has_gaps = True
            if not kv.gapless or self.windows[kv.number] is not None:
                is_ragged = True
        step.has_gaps = has_gaps
        return has_gaps and (step.new > 1 or is_ragged)

    def attend(self, step: Step, attention: Attention) -> None:
        """Say in which columns the keys stand that are left in a layer."""
        if step.has_gaps:
            place_keys(step, attention)

    def after(self, step: Step) -> TakeBack | None:
        """Count what the cache holds."""
        if step.layers:
            known = step.state.known
            queries, counted = known.get(QueryKeeper.KEY), known[_METER]
            assert isinstance(counted, CountedRows)
            latest = queries.by_layer if isinstance(queries, LatestQueries) else None
            counted.meter.note(step.layers, decodes=step.decodes, queries=latest)
        return None


def meter_of(state: RowState) -> Meter:
    """Return the counter of the cache on which the rows lie."""
    counted = state.known[_METER]
    assert isinstance(counted, CountedRows)
    return counted.meter


def own_attention(run: Run) -> None:
    """Refuse a block that acts on the cache or attention of a model inside another one that does.

    Raises:
        UnsupportedError: There is such a block.
    """
    for number in runs_here(run.target.base):
        if number in _OWNERS and number != run.number:
            raise UnsupportedError(
                f"{run.target.name} is already inside a `with` that acts on its cache: enter them together, "
                "`(a | b).on(model)`"
            )
    if run.number not in _OWNERS:
        _OWNERS.add(run.number)
        run.stack.callback(_OWNERS.discard, run.number)


_OWNERS: set[int] = set()
"""Numbers of the blocks that act on caches or replace attention."""


def note_gaps(step: Step) -> None:
    """Note whether some layer of the cache lacks tokens, once everybody has acted on it."""
    step.has_gaps = False
    for kv in step.layers:  # a plain loop: every token comes here
        if kv.slot_positions is not None:
            step.has_gaps = True


def place_keys(step: Step, attention: Attention) -> None:
    """Say in which columns the keys of a layer stand, if tokens are missing in the cache."""
    kv = layer_of(step, attention.layer)
    if kv is None or not step.has_gaps or attention.lacks_keys:
        return
    attention.lacks_keys = True
    source = attention.source
    sees_all = not isinstance(source, TensorMask)
    if isinstance(source, FunctionMask):
        sees_all = source.local is None and not source.by_vmap
    attention.slots_of = partial(_columns_of, step, kv)
    attention.is_whole = attention.queries == 1 and kv.gapless and sees_all and not attention.hidden


def _columns_of(step: Step, kv: CacheLayer) -> Int[Tensor, "batch _ slot"]:
    """Columns of the slots of a layer."""
    return step.tokens.columns_of(kv.pos)


def layer_of(step: Step, number: int) -> CacheLayer | None:
    """Return the cache of a decoder layer in a call; None if it is not one of ours."""
    layers = getattr(step.cache, "layers", None)
    if not layers or number >= len(layers):
        return None
    kv = layers[number]
    return kv if isinstance(kv, CacheLayer) else None
