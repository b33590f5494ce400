"""What policies and observers are shown: attention rows, moments, and what is known of a cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.interventions.positions import Call
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.usage import Meter
from sinkscope.models.target import Target


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
class Prompt:
    """The attention of one layer in a call with several tokens.

    Attributes:
        layer: decoder layer.
        query: after rotary.
        key: of all slots, after rotary.
        value: of all slots.
        pos: true position of each slot, -1 where there is none.
        query_pos: true position of each query, -1 at padding.
        kv: the cache of the layer, if it is one of ours.
        window: keys this far back and further are not seen; None: all are.
        settings: of the layer, as the model gives them: "scaling", "softcap", "s_aux".
    """

    layer: int
    query: Float[Tensor, "batch head query d_head"]
    key: Float[Tensor, "batch kv_head slot d_head"]
    value: Float[Tensor, "batch kv_head slot d_value"]
    pos: Int[Tensor, "batch kv_head slot"]
    query_pos: Int[Tensor, "batch query"]
    kv: CacheLayer | None
    window: int | None
    settings: dict[str, Any]


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


def rebased_by(kv: CacheLayer, call: Call) -> Int[Tensor, " batch"] | None:
    """Tokens per row by which new ones move up, because those before them did; None: positions are the true ones."""
    if not kv.rebased:
        return None
    return call.before - (kv.pos[:, 0] >= 0).sum(-1).to(call.before.device)


def layer_window(target: Target, layer: int) -> int | None:
    """Sliding window of a layer, in tokens; None: it sees everything."""
    config = target.config
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return int(window) if window else None
    return int(window) if window and kinds[layer] == "sliding_attention" else None
