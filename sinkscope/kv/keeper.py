"""Who keeps the caches of a run: it takes them over, says when a prompt has ended, and counts what they hold.

`CacheKeeper.of(run)` is the keeper of a run, made when the first policy or guard asks. It is the first of the run's
actors, so the others find in each `Step` the layers that can evict and whether the call decodes. What cannot be served
is refused when the keeper is made, or when a cache is taken over (`adopt`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import Attention
from sinkscope.engine.rows import RowState, TokenPositions
from sinkscope.engine.run import Run, check_generation, runs_here
from sinkscope.engine.step import Step, TakeBack
from sinkscope.engine.tap import check_attention_visible
from sinkscope.engine.visible import FunctionMask, TensorMask
from sinkscope.errors import UnsupportedError, warn
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.latest_queries import QueryKeeper
from sinkscope.kv.usage import Meter, Usage
from sinkscope.models.numbering import check_caches_filled
from sinkscope.models.target import Target
from sinkscope.models.windows import layer_window, layers_with_states
from sinkscope.results.notation import count_of

_METER = "meter"


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
        cache = step.cache
        state = step.state
        if cache is None:
            return
        meter = state.known.get(_METER)
        if meter is None:
            adopt(cache, self.target, step.earlier)
            state.known[_METER] = meter = Meter(self.windows)
        if cache not in self._caches:  # a new one, or a copy
            self._caches.add(cache)
            self.meters.append(meter)
        step.anchors = self.anchors
        tokens = state.tokens
        layers = step.layers
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
        """Refuse rows without tokens, and rows that end with padding, where their last query is none of theirs."""
        ends = step.earlier.pos[:, -1] < 0
        if not bool(ends.any()):
            return
        empty = (step.before == 0).nonzero()
        if len(empty):
            raise UnsupportedError(
                f"row {int(empty[0])} of this batch has no token: cache policies and guards need a prompt in each row"
            )
        raise UnsupportedError(
            f"rows of this batch are padded on the right, where {self.target.name} would write on: cache policies and "
            "guards need padding on the left (tokenizer.padding_side = 'left')"
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
        place_keys(step, attention)

    def after(self, step: Step) -> TakeBack | None:
        """Count what the cache holds."""
        if step.layers:
            known = step.state.known
            known[_METER].note(step.layers, decodes=step.decodes, queries=known.get(QueryKeeper.KEY))
        return None


def meter_of(state: RowState) -> Meter:
    """Return the counter of the cache on which the rows lie."""
    return state.known[_METER]


def own_attention(run: Run) -> None:
    """Refuse a block that acts on the cache or attention of a model inside another one that does.

    Raises:
        UnsupportedError: There is such a block.
    """
    for other in runs_here(run.target.base):
        if other.owns_attention and other is not run:
            raise UnsupportedError(
                f"{run.target.name} is already inside a `with` that acts on its cache: enter them together, "
                "`(a | b).on(model)`"
            )
    run.owns_attention = True


def note_gaps(step: Step) -> None:
    """Note whether some layer of the cache lacks tokens, once everybody has acted on it."""
    step.has_gaps = False
    for kv in step.layers:  # a plain loop: every token comes here
        if kv.slot_positions is not None:
            step.has_gaps = True


def place_keys(step: Step, attention: Attention) -> None:
    """Say in which columns the keys of a layer stand, if tokens are missing in the cache."""
    kv = layer_of(step, attention.layer) if step.has_gaps else None
    if kv is None or attention.lacks_keys:
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


def check_seen(cache: Any) -> None:
    """Refuse a cache on which attention cannot be seen.

    Raises:
        UnsupportedError: It holds room for tokens that are still to come.
    """
    if getattr(cache, "is_compileable", False):
        raise UnsupportedError(
            f"the cache is {_named(cache)}, which holds room for tokens that are still to come: "
            "attention is observed and replaced on a plain DynamicCache; pass `DynamicCache()` or nothing"
        )


def adopt(cache: Any, target: Target, columns: TokenPositions) -> None:
    """Replace the layers of a stock cache by ours in place, so that the caller's object works over several turns.

    Args:
        cache: An empty or filled `DynamicCache`.
        target: The model.
        columns: The tokens already in the cache.

    Raises:
        UnsupportedError: The cache is of another kind.
    """
    layers: list[Any] = getattr(cache, "layers", None) or []
    if own_layers(cache):
        return
    offloading = getattr(cache, "offloading", False)
    if not isinstance(cache, DynamicCache) or offloading:
        raise UnsupportedError(
            f"the cache is {_named(cache)}: a cache policy or guard needs a plain DynamicCache; pass `DynamicCache()` "
            "or nothing"
        )
    ours = _empty_layers(target)
    if cache.get_seq_length() > 0:
        for layer in layers:
            if type(layer) is not DynamicLayer:
                raise UnsupportedError(
                    f"the cache already holds tokens in a {type(layer).__name__}, which may have dropped some: "
                    "start with an empty cache inside the `with`"
                )
        for new, old in zip(ours, layers, strict=True):
            new.upcoming = columns
            new.update(old.keys, old.values)
    cache.layers = ours
    cache.layer_class_to_replicate = None
    if hasattr(cache, "linear_cache"):  # MiniMax keeps states beside the layers, and takes this list for as long
        states: Any = cache
        states.linear_cache = [[] if isinstance(layer, CacheLayer) else None for layer in ours]


def _named(cache: Any) -> str:
    """The class of a cache, and how `generate` is asked for one."""
    kind = type(cache).__name__
    asked = {"StaticCache": "static", "QuantizedCache": "quantized"}.get(kind)
    if getattr(cache, "offloading", False):
        asked = "offloaded"
    if asked is None:
        return kind
    return f"{kind} (cache_implementation={asked!r})"


def own_layers(cache: Any) -> list[CacheLayer]:
    """Return the layers of a cache that are ours.

    Others, such as the state of linear attention, are left as they are.
    """
    return [layer for layer in getattr(cache, "layers", None) or [] if isinstance(layer, CacheLayer)]


def refuse_states(cache: Any, what: str) -> None:
    """Refuse to take tokens back from a cache with layers that keep a state, which cannot go back.

    Raises:
        UnsupportedError: There is such a layer.
    """
    for layer in cache.layers:
        if type(layer) is not CacheLayer:
            raise UnsupportedError(
                f"{what} takes tokens back, and a {type(layer).__name__} of this model's cache keeps a state that "
                "cannot go back: use another model"
            )


def _empty_layers(target: Target) -> list[Any]:
    """The layers of a new cache of the model: ours where the stock cache holds keys and values alone."""
    layers: list[Any] = list(DynamicCache(config=target.config).layers[: target.n_layers])
    for number in cache_layers(target):
        layers[number] = CacheLayer(number)
    return layers


def cache_layers(target: Target) -> list[int]:
    """Return layers whose part of the cache holds keys and values alone; others keep a state.

    There are none if an indexer chooses, or if attention is outside transformers' attention interface.
    """
    if not target.adapter.attention_interface:
        return []
    for layer in target.attending:
        if hasattr(target.sub(layer, "attn"), "indexer"):
            return []
    states = layers_with_states(target)
    return [number for number in range(target.n_layers) if number not in states]


def check_servable(target: Target) -> None:
    """Refuse a model on which no cache policy and no attention observer can act.

    Raises:
        UnsupportedError: It is a TransformerBridge, its attention is outside transformers' attention interface, or its
            cache holds no keys and values of which a layer sees all.
    """
    check_attention_visible(target)
    shared = getattr(target.config, "num_kv_shared_layers", 0) or 0
    if shared:
        raise UnsupportedError(
            f"{count_of(shared, 'layer')} of {target.name} attend to the keys of earlier layers, which cannot be cut "
            "or observed for these alone: use another model for cache policies, guards and observers; find-sinks and "
            "edits work on this one"
        )
    check_caches_filled(target)
    if not cache_layers(target):
        raise UnsupportedError(
            f"the cache of {target.name} is not a plain key/value cache (it keeps a recurrent state, or an indexer "
            "selects keys): use another model for cache policies and attention observers"
        )


def check_mask(mask: Any, step: Step, target: Target) -> None:
    """Refuse a further turn whose mask hides tokens that earlier calls read.

    Raises:
        UnsupportedError: It does.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < step.past:
        return
    earlier = step.earlier.pos
    hidden = (mask[:, : step.past] == 0).to(earlier.device) & (earlier >= 0)
    if bool(hidden.any()):
        pad = target.config.get_text_config().pad_token_id
        tokens = count_of(int(hidden.sum()), "token")
        raise UnsupportedError(
            f"the attention mask of this turn hides {tokens} that earlier calls have read; without a mask, "
            f"`generate` takes every token equal to pad_token_id={pad} for padding: pass attention_mask with 1 at "
            "every real token"
        )
