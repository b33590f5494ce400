"""What policies and observers are shown: attention rows, moments, and what is known of a cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.interventions.positions import Call
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.usage import Meter


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
