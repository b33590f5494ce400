"""What is known about a cache across the calls of a run, and about the call in which a thread is."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from sinkscope.hooks.edit.positions import Call
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.latest_queries import LatestQueries
from sinkscope.kv.usage import Meter


@dataclass(eq=False)
class CacheState:
    """What is known about one cache across the calls of a run.

    Attributes:
        prefilling: Whether the last call read a prompt or part of one.
        prompt: Number of real tokens in each row at the end of the last prefill; empty before it.
        decoded: Number of single-token calls since then.
        queries: The latest queries of each layer, if requested.
        meter: Counter of tokens and bytes.
    """

    prefilling: bool = False
    prompt: tuple[int, ...] = ()
    decoded: int = 0
    queries: dict[int, LatestQueries] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)

    def note_held(self, layers: list[CacheLayer]) -> None:
        """Count what is held after a call."""
        queries = sum([latest.nbytes for latest in self.queries.values()])
        self.meter.note(layers, decodes=not self.prefilling, further_bytes=queries)


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


class CurrentCall(threading.local):
    """The forward call that the current thread is in.

    Attributes:
        call: The forward call; None outside of one.
        cache: The cache of that call.
        state: What is known about that cache.
        own_masks: Whether our masks replace the stock mask, because some layer does not hold all tokens so far.
    """

    call: Call | None = None
    cache: Any = None
    state: CacheState | None = None
    own_masks: bool = False

    def end(self) -> None:
        """Forget the call, which has ended."""
        self.call = self.cache = self.state = None
        self.own_masks = False
