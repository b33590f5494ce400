"""How much a cache held, in tokens and in bytes, with and without holes."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_, mul

import torch
from torch import Tensor

from sinkscope.kv.cache import CacheLayer


@dataclass(frozen=True)
class Usage:
    """What one cache held, over all counted calls.

    Attributes:
        calls: Number of forward calls.
        mean_tokens: For each row, number of cached tokens after a call, averaged over calls, layers and kv heads.
        peak_tokens: For each row, largest number of cached tokens after a call, averaged over layers and kv heads.
        logical_bytes: Peak number of bytes in keys and values of cached tokens, summed over rows and layers.
        physical_bytes: Peak number of bytes allocated for them, including holes, padding, room for the next tokens, and
            working copies.
        read_tokens: Number of tokens that the longest row has read, whether still held or not.
    """

    calls: int
    mean_tokens: list[float]
    peak_tokens: list[float]
    logical_bytes: int
    physical_bytes: int
    read_tokens: int = 0


@dataclass(eq=False)
class _Span:
    """Successive calls between which the number of holes did not change in any layer.

    Attributes:
        counts: Number of slots without a token, as counted by the layers; empty if there are no holes.
        lost: Number of empty slots of each row, summed over the layers.
        widths: Bytes per slot of each layer, all kv heads together.
        calls: Number of calls.
        slots: Number of slots of all layers, summed over the calls.
        most: Largest number of slots in one call.
    """

    counts: list[Tensor]
    lost: Tensor
    widths: list[int]
    calls: int = 0
    slots: int = 0
    most: int = 0

    def covers(self, rows: int, counts: list[Tensor], first: CacheLayer) -> bool:
        """Whether a call belongs to the span. Rebased keys are float32, so the bytes of a slot may change too."""
        same = len(self.lost) == rows and len(counts) == len(self.counts) and all(map(is_, counts, self.counts))
        return same and self.widths[0] == _bytes(first)


@dataclass(eq=False)
class Meter:
    """Counts tokens and bytes. It does not wait for the device until `usage` is called.

    While the number of holes stays the same, as in most calls, calls are summed as plain numbers. A tensor operation
    per call would cost more than the count is worth.
    """

    calls: int = 0
    physical: int = 0
    read: int = 0
    _span: _Span | None = None
    _counted: int = 0  # calls in the sums
    _sum: Tensor | None = None  # per row
    _peak: Tensor | None = None
    _logical: list[Tensor] = field(default_factory=list)  # bytes

    def note(self, layers: list[CacheLayer]) -> None:
        """Count what the layers hold after a call."""
        first, span = layers[0], self._span
        if not first.slots:
            return
        rows, device = first.keys.shape[0], first.keys.device
        self.calls, self.read = self.calls + 1, max(self.read, first.seen)
        # The whole layer is what is held; a copy of a part of it is only allocated.
        wholes = [layer.aside or layer for layer in layers]
        counts = [] if all(layer.whole for layer in wholes) else [layer.holes() for layer in wholes]
        if span is None or not span.covers(rows, counts, first):
            self._settle()
            lost = torch.stack([n.to(device) for n in counts]).sum(0) if counts else torch.zeros(rows, device=device)
            span = self._span = _Span(counts, lost, [_bytes(layer) for layer in layers])
        slots = sum(whole.slots + layer.seen - whole.seen for layer, whole in zip(layers, wholes, strict=True))
        allocated = [layer.allocated + (layer.aside.allocated if layer.aside else 0) for layer in layers]
        self.physical = max(self.physical, rows * sum(map(mul, allocated, span.widths)))
        span.calls, span.slots, span.most = span.calls + 1, span.slots + slots, max(span.most, slots)

    def _settle(self) -> None:
        """Bring the sums up to date before the number of holes changes."""
        span, self._span = self._span, None
        if span is None:
            return
        held = (span.slots - span.calls * span.lost) / len(span.widths)
        peak = (span.most - span.lost) / len(span.widths)
        self._logical = [torch.stack([*self._logical, peak.double().sum() * sum(span.widths)]).amax()]
        if self._sum is not None and self._peak is not None and len(held) % len(self._sum) == 0:
            times = len(held) // len(self._sum)  # each row may have become several
            held = held + self._sum.repeat_interleave(times)
            peak = torch.maximum(peak, self._peak.repeat_interleave(times))
        else:  # the first calls, or rows were chosen and nobody knows which: count from here on
            self._counted = 0
        self._sum, self._peak, self._counted = held, peak, self._counted + span.calls

    def usage(self) -> Usage:
        """The totals so far."""
        self._settle()
        if self._sum is None or self._peak is None:
            return Usage(0, [], [], 0, 0)
        mean = (self._sum / self._counted).tolist()
        return Usage(self.calls, mean, self._peak.tolist(), round(float(self._logical[0])), self.physical, self.read)


def _bytes(layer: CacheLayer) -> int:
    """Bytes of the keys and values of one slot, all kv heads together."""
    return sum(t.shape[1] * t.shape[-1] * t.element_size() for t in (layer.keys, layer.values))
