"""What policies and guards know of a cache across the calls of a run, and of the call that is about to run."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.engine.step import Call
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.latest_queries import LatestQueries
from sinkscope.kv.usage import Meter


@dataclass(eq=False)
class CacheState:
    """What is known about one cache across the calls of a run; it lies on the cache (`engine.step`).

    Attributes:
        prefilling: Whether the last call read a prompt or part of one.
        prompt: Number of real tokens in each row at the end of the last prefill; empty before it.
        decoded: Number of single-token calls since then.
        queries: The latest queries of each layer, if requested.
        guarded: What a guard knows of the rows.
        meter: Counter of tokens and bytes.
    """

    prefilling: bool = False
    prompt: tuple[int, ...] = ()
    decoded: int = 0
    queries: dict[int, LatestQueries] = field(default_factory=dict)
    guarded: Any = None
    meter: Meter = field(default_factory=Meter)

    def take(self, rows: Int[Tensor, " row"]) -> None:
        """Let the rows be others of the batch, by their numbers; a guard begins to watch them anew."""
        if self.prompt:
            self.prompt = tuple(self.prompt[row] for row in _numbers(rows))
        self.queries = {layer: queries.take(rows) for layer, queries in self.queries.items()}
        self.guarded = None


def _numbers(rows: Int[Tensor, " row"]) -> list[int]:
    """The numbers of rows, which may be given by a mask."""
    if rows.dtype == torch.bool:
        rows = rows.nonzero()[:, 0]
    return rows.tolist()


@dataclass(frozen=True, eq=False)
class Moment:
    """A forward call of a run with policies, guards or observers; made before it, and read before and after it.

    Attributes:
        cache: The cache; None if the call uses none.
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

    def layer(self, number: int) -> CacheLayer | None:
        """Return the cache of a decoder layer; None if it is not a `CacheLayer`."""
        layers = getattr(self.cache, "layers", None)
        if not layers or number >= len(layers):
            return None
        kv = layers[number]
        return kv if isinstance(kv, CacheLayer) else None


class Generation(threading.local):
    """What `generate` is doing in the current thread.

    Attributes:
        prompting: Whether it is reading a prompt, so that even a single-token call is a part of it.
        resuming: Whether it goes on after tokens were taken back, so that it reads no prompt.
        settings: Settings of the latest `generate`; None without one.
        ended: The call that ended last; None if there is none, or somebody has taken it.
    """

    prompting: bool = False
    resuming: bool = False
    settings: Any = None
    ended: Moment | None = None

    def set_prompting(self, reads: bool) -> None:
        """Note that a prompt is going to be read, or was."""
        self.prompting = reads and not self.resuming
