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
        logical_bytes: most bytes of keys and values of the tokens that are held, all rows and layers.
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
    _counted: int = 0  # calls in the sum
    _sum: Tensor | None = None
    _peak: Tensor | None = None
    _logical: Tensor | None = None
    _lost: Tensor | None = None  # slots without a token, per row, all layers together

    def note(self, layers: list[CacheLayer]) -> None:
        """After a call."""
        first = layers[0]
        if first.keys is None or not first.slots:
            return
        batch = first.keys.shape[0]
        slots = sum(layer.slots for layer in layers)
        self.calls += 1
        self.physical = max(self.physical, batch * sum(layer.slots * _bytes(layer) for layer in layers))
        self._bytes_per_token = sum(_bytes(layer) for layer in layers)
        if self._lost is None or any(layer.recount for layer in layers):
            self._lost = torch.stack([layer.holes().to(first.keys.device) for layer in layers]).sum(0)
        held: Tensor = (slots - self._lost) / len(layers)
        if self._sum is not None and self._peak is not None and len(held) != len(self._sum):
            if len(held) % len(self._sum) == 0:  # each row became several
                times = len(held) // len(self._sum)
                self._sum, self._peak = (t.repeat_interleave(times) for t in (self._sum, self._peak))
            else:  # nothing says which rows are left: from here on
                self._sum = self._peak = None
        if self._sum is None or self._peak is None:
            self._sum, self._peak, self._counted = held, held, 1
        else:
            self._sum, self._peak = self._sum + held, torch.maximum(self._peak, held)
            self._counted += 1
        logical = held.sum()
        self._logical = logical if self._logical is None else torch.maximum(self._logical, logical)

    def usage(self) -> Usage:
        """The totals so far."""
        if self._sum is None or self._peak is None or self._logical is None:
            return Usage(0, [], [], 0, 0)
        mean = (self._sum / self._counted).tolist()
        logical = round(float(self._logical) * self._bytes_per_token)
        return Usage(self.calls, mean, self._peak.tolist(), logical, self.physical)


def _bytes(layer: CacheLayer) -> int:
    """Of the key and value of one slot, all kv heads."""
    both = [t for t in (layer.keys, layer.values) if t is not None]
    return sum(t.shape[1] * t.shape[-1] * t.element_size() for t in both)
