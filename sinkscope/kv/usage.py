"""How much a cache held: tokens, and bytes with and without holes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinkscope.kv.cache import CacheLayer


@dataclass(frozen=True)
class Usage:
    """Of one cache over all calls after which it was looked at.

    Attributes:
        calls: forward calls.
        mean_tokens: per row: cached tokens after a call, mean over calls, layers and kv heads.
        peak_tokens: per row: the most there were after one call, mean over layers and kv heads.
        logical_bytes: most bytes of keys and values that can be attended to, all rows and layers.
        physical_bytes: most bytes allocated for them, holes and padding included.
    """

    calls: int
    mean_tokens: list[float]
    peak_tokens: list[float]
    logical_bytes: int
    physical_bytes: int


@dataclass(eq=False)
class Meter:
    """Adds up; nothing waits for the device before `usage` is asked for."""

    calls: int = 0
    physical: int = 0
    _bytes_per_token: int = 0  # of all layers and kv heads
    _batch: int = 0
    _sum: Tensor | None = None
    _peak: Tensor | None = None
    _logical: Tensor | None = None
    _lost: Tensor | None = None  # slots without a token, per row, all layers together

    def note(self, layers: list[CacheLayer]) -> None:
        """After a call."""
        first = layers[0]
        if first.keys is None or not first.slots:
            return
        batch, heads, _, width = first.keys.shape
        size = first.keys.element_size() * (width + first.values.shape[-1]) if first.values is not None else 0
        slots = sum(layer.slots for layer in layers)
        self.calls += 1
        self.physical = max(self.physical, slots * batch * heads * size)
        self._bytes_per_token = heads * size * len(layers)
        if self._lost is None or any(layer.recount for layer in layers):
            self._lost = torch.stack([layer.holes().to(first.keys.device) for layer in layers]).sum(0)
        held: Tensor = (slots - self._lost) / len(layers)
        if self._sum is None or self._peak is None or self._logical is None or len(held) != self._batch:
            self._sum, self._peak, self._logical, self._batch = held, held, held.sum(), len(held)
            return
        self._sum = self._sum + held
        self._peak = torch.maximum(self._peak, held)
        self._logical = torch.maximum(self._logical, held.sum())

    def usage(self) -> Usage:
        """The totals so far."""
        if self._sum is None or self._peak is None or self._logical is None:
            return Usage(0, [], [], 0, 0)
        mean = (self._sum / self.calls).tolist()
        logical = round(float(self._logical) * self._bytes_per_token)
        return Usage(self.calls, mean, self._peak.tolist(), logical, self.physical)
