"""Who keeps the caches of a run: it takes them over, says when a prompt has ended, and counts what they hold.

`CacheKeeper.of(run)` is the keeper of a run, made when the first policy or guard asks. It acts before whoever asked,
who finds in each `Step` the layers that can evict and whether the call decodes. What cannot be served is refused when
the keeper is made, or when a cache is taken over (`adopt`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from sinkscope.engine.actor import Actor
from sinkscope.engine.calls import note_layers
from sinkscope.engine.run import Run, runs_here
from sinkscope.engine.step import Step
from sinkscope.engine.tap import check_attention_visible
from sinkscope.errors import UnsupportedError
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.usage import Usage
from sinkscope.models.layers import check_caches_filled, layers_with_states
from sinkscope.models.quirks import add_states, tokens_in
from sinkscope.models.target import Target
from sinkscope.results.notation import count_of


def held_tokens(layers: Sequence[CacheLayer]) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
    """Return how many tokens of each row layers hold, and how many of these the call read; means over layers and heads.

    It reads fewer than are held where it reads a copy of a part. This does not wait for the device.
    """
    device = layers[0].keys.device
    held: Any = 0
    read: Any = 0
    for kv in layers:  # a plain loop: every token comes here
        n_tokens = kv.keys.shape[-2] if kv.gapless else kv.occupied(device)
        read = read + n_tokens
        if kv.whole_layer is not None:
            n_tokens = kv.whole_layer.occupied(device) + kv.seen - kv.whole_layer.seen
        held = held + n_tokens
    rows = len(layers[0].keys)
    held, read = torch.as_tensor(held, dtype=torch.double), torch.as_tensor(read, dtype=torch.double)
    return held.expand(rows) / len(layers), read.expand(rows) / len(layers)


_NOTHING = torch.zeros(0)


@dataclass(eq=False)
class Meter:
    """What one cache held, in a memory that does not grow with the number of calls.

    Attributes:
        n_tokens: Number of tokens read, by the longest row.
        steps: Number of decoding steps since the number of rows changed: nobody knows which row became which.
        held: Tokens of each row that the cache held after these, summed over them.
        read: Those of them that the steps read.
        most: Largest number that was held.
        nbytes: Largest number of bytes.
    """

    n_tokens: int = 0
    steps: int = 0
    held: Tensor = _NOTHING
    read: Tensor = _NOTHING
    most: Tensor = _NOTHING
    nbytes: int = 0

    def usage(self, processes: int) -> Usage:
        """Return the totals so far, of a model of which so many processes hold as many heads each."""
        steps = max(1, self.steps)
        held, read = (self.held / steps).tolist(), (self.read / steps).tolist()
        return Usage(self.most.tolist(), self.nbytes * processes, self.n_tokens, mean_held=held, mean_read=read)


LATEST_QUERIES = "latest queries"
"""By what the latest queries of rows are known, whose bytes are counted."""


class CacheKeeper(Actor):
    """Keeps the caches of a block.

    Attributes:
        target: The model.
        anchors: Number of first positions that the policies and guards of the block keep.
        meters: What counts each of the caches in use.
    """

    def __init__(self, run: Run) -> None:
        self.target = run.target
        self.anchors = 0
        self._policy_name: str | None = None
        self._acts = False  # on each generated token
        self.meters: WeakKeyDictionary[Any, Meter] = WeakKeyDictionary()
        self._counted: list[Meter] = []  # of all caches

    def __repr__(self) -> str:
        """Return who asked for it, and how many caches it has counted."""
        return f"CacheKeeper(policy={self._policy_name}, anchors={self.anchors}, caches={len(self._counted)})"

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
        keeper: CacheKeeper = run.keeper
        if run.keeper is None:
            check_servable(run.target)
            own_attention(run)
            keeper = run.keeper = cls(run)
            run.stack.callback(keeper._settle)
            run.act(keeper)  # before who asked: others find what it says in the record of the call
        if policy is not None and keeper._policy_name is not None:
            raise UnsupportedError(
                f"{keeper._policy_name} and {policy} would both choose what the cache keeps: enter one of them"
            )
        keeper._policy_name = policy or keeper._policy_name
        keeper.anchors = max(keeper.anchors, first)
        return keeper

    def watch_decoding(self, run: Run) -> None:
        """Ask that tokens come one by one, in rows that keep their places."""
        self._acts = True
        run.uncached = "there is no cache that a cache policy or a guard could act on"
        run.by_token = "a cache policy acts on tokens that come one by one (Full does not)"

    @property
    def usage(self) -> list[Usage]:
        """Tokens and bytes of every cache of the block; of a model that is split, the bytes of all processes."""
        return [meter.usage(self.target.processes) for meter in self._counted if meter.n_tokens]

    def _settle(self) -> None:
        """Leave whole caches behind."""
        for cache in list(self.meters):
            for kv in cache.layers:
                if isinstance(kv, CacheLayer):
                    kv.settle()

    # What the block calls -------------------------------------------------------------------------------------------

    def before(self, step: Step) -> None:
        """Take the cache of a call over, and say whether the call decodes."""
        cache = step.cache
        state = step.state
        if cache is None:
            return
        if cache not in self.meters:  # a new one, or a copy
            if not step.layers:
                adopt(cache, self.target)
                note_layers(step)
            self.meters[cache] = Meter()
            self._counted.append(self.meters[cache])
        step.anchors = self.anchors
        if not step.layers:
            return
        if step.new > 1 or not step.past or step.prompting:
            if step.past and step.new > 1:
                _check_mask(step.arguments.get("attention_mask"), step)
            state.prefilling = True
            for kv in step.layers:
                kv.settle()
                kv.reordered = False
            return
        step.decodes = True
        step.prefill_ended = state.prefilling or not state.prompt  # of a cache that others filled, too
        state.prefilling = False
        state.decoded += 1
        if step.prefill_ended:
            state.prompt = tuple(step.earlier.length.tolist())
            state.decoded = 0
        if self._acts:
            if step.prefill_ended:
                _check_ends(step)
            if step.layers[0].reordered:
                raise UnsupportedError(
                    "rows of the cache changed places or number after the prompt, as in beam search, and cache "
                    "policies and guards follow each row: use num_beams=1"
                )

    def attends(self, step: Step) -> bool:
        """Return whether the model's own attention would not see right what is left in the cache.

        Of a layer that does not see all of it, because it has a window or chunks, the tap finds out by itself.
        """
        if not step.has_gaps or step.new > 1:
            return step.has_gaps
        return not all(kv.gapless for kv in step.layers)

    def after(self, step: Step) -> None:
        """Count what the cache holds."""
        layers = step.layers
        if not layers or layers[0].columns is None or not layers[0].keys.shape[-2]:
            return
        meter = self.meters[step.cache]
        meter.n_tokens = layers[0].columns.n_columns
        if not step.decodes:
            return
        held, read = held_tokens(layers)
        if len(meter.held) != len(held):
            meter.steps = 0
            meter.held = meter.read = meter.most = torch.zeros_like(held)
        meter.steps += 1
        meter.held = meter.held + held
        meter.read = meter.read + read
        meter.most = meter.most.maximum(held)
        queries = step.state.known.get(LATEST_QUERIES)
        used = 0 if queries is None else queries.nbytes
        for kv in layers:
            for part in (kv, kv.whole_layer):
                if part is not None:
                    memory = part if part.room is None else part.room
                    used += memory.keys.nbytes + memory.values.nbytes
        meter.nbytes = max(meter.nbytes, used)


def _check_ends(step: Step) -> None:
    """Refuse rows that end with padding, or have nothing else: their last query is none of theirs."""
    padded = (step.earlier.pos[:, -1] < 0).nonzero()
    if len(padded):
        row = int(padded[0])
        has = "has no token" if int(step.earlier.length[row]) == 0 else "is padded on the right"
        raise UnsupportedError(
            f"row {row} of this batch {has}, and cache policies and guards need a prompt in each row, with padding "
            "on the left (tokenizer.padding_side = 'left')"
        )


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


def check_seen(step: Step) -> None:
    """Refuse a cache on which attention cannot be seen.

    Raises:
        UnsupportedError: It holds room for tokens that are still to come.
    """
    if getattr(step.cache, "is_compileable", False):
        raise UnsupportedError(
            f"the cache is {_named(step.cache)}, which holds room for tokens that are still to come: "
            "attention is observed and replaced on a plain DynamicCache; pass `DynamicCache()` or nothing"
        )


def adopt(cache: Any, target: Target) -> None:
    """Replace the layers of a stock cache by ours in place, so that the caller's object works over several turns.

    Args:
        cache: An empty `DynamicCache`.
        target: The model.

    Raises:
        UnsupportedError: The cache is of another kind, or was filled by others.
    """
    if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
        raise UnsupportedError(
            f"the cache is {_named(cache)}: a cache policy or guard needs a plain DynamicCache; pass `DynamicCache()` "
            "or nothing"
        )
    if tokens_in(cache):
        raise UnsupportedError(
            "this cache was filled outside of the `with`, where nothing saw the tokens that are read: start with an "
            "empty cache inside it"
        )
    ours: list[Any] = list(DynamicCache(config=target.config).layers[: target.n_layers])
    for number in cache_layers(target):  # others, such as the state of linear attention, are left as they are
        ours[number] = CacheLayer(number)
    cache.layers = ours
    cache.layer_class_to_replicate = None
    add_states(cache, [isinstance(layer, CacheLayer) for layer in ours])


def _named(cache: Any) -> str:
    """The class of a cache, and whether it offloads."""
    return type(cache).__name__ + (" (offloaded)" if getattr(cache, "offloading", False) else "")


def cache_layers(target: Target) -> list[int]:
    """Return layers whose part of the cache holds keys and values alone; others keep a state.

    There are none if attention is outside transformers' attention interface.
    """
    if not target.adapter.attention_interface:
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
            f"the cache of {target.name} is not a plain key/value cache (it keeps a recurrent state): use another "
            "model for cache policies and attention observers"
        )


def _check_mask(mask: Any, step: Step) -> None:
    """Refuse a further turn whose mask hides tokens that earlier calls read.

    Raises:
        UnsupportedError: It does.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < step.past:
        return
    earlier = step.earlier.pos
    hidden = int(((mask[:, : step.past] == 0).to(earlier.device) & (earlier >= 0)).sum())
    if hidden:
        raise UnsupportedError(
            f"the attention mask of this turn hides {count_of(hidden, 'token')} that earlier calls have read; without "
            "a mask, `generate` takes every token equal to pad_token_id for padding: pass attention_mask with 1 at "
            "every real token"
        )
