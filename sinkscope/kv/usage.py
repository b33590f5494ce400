"""How much a cache held: tokens, and bytes with and without holes."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import mul

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
    """Adds up; nothing waits for the device before `usage` is asked for.

    While the number of holes stands, as in most calls, calls are summed as plain numbers: a tensor operation per call
    and row would cost more than the counting is worth.
    """

    calls: int = 0
    physical: int = 0
    _widths: list[int] = field(default_factory=list)  # bytes per slot of each layer, all kv heads
    _lost: Tensor | None = None  # slots without a token, per row, all layers together
    _whole: bool = False  # there are none
    _pending: int = 0  # calls since that number changed; their slots in all layers, and the most in one call
    _slots: int = 0
    _most: int = 0
    _counted: int = 0  # calls in the sum
    _sum: Tensor | None = None
    _peak: Tensor | None = None
    _logical: Tensor | None = None

    def note(self, layers: list[CacheLayer]) -> None:
        """After a call."""
        first = layers[0]
        if first.keys is None or not first.slots:
            return
        batch = first.keys.shape[0]
        if not self._widths:
            self._widths = [_bytes(layer) for layer in layers]
        slots = [layer.slots for layer in layers]
        self.calls += 1
        self.physical = max(self.physical, batch * sum(map(mul, slots, self._widths)))
        whole = all(layer.whole for layer in layers)
        known = self._lost is not None and len(self._lost) == batch and whole == self._whole
        if not known or not (whole or not any(layer.recount for layer in layers)):
            self._settle()
            device, self._whole = first.keys.device, whole
            holes = [torch.zeros(batch, device=device)] if whole else [layer.holes().to(device) for layer in layers]
            self._lost = torch.stack(holes).sum(0)
        self._pending, self._slots, self._most = (
            self._pending + 1,
            self._slots + sum(slots),
            max(self._most, sum(slots)),
        )

    def _settle(self) -> None:
        """Bring the sums up to date before the number of holes changes."""
        if self._lost is None or not self._pending:
            return
        held = (self._slots - self._pending * self._lost) / len(self._widths)
        peak = (self._most - self._lost) / len(self._widths)
        if self._sum is not None and self._peak is not None and len(held) != len(self._sum):
            if len(held) % len(self._sum) == 0:  # each row became several
                times = len(held) // len(self._sum)
                self._sum, self._peak = (t.repeat_interleave(times) for t in (self._sum, self._peak))
            else:  # nothing says which rows are left: from here on
                self._sum = self._peak = None
        if self._sum is None or self._peak is None:
            self._sum, self._peak, self._counted = held, peak, self._pending
        else:
            self._sum, self._peak = self._sum + held, torch.maximum(self._peak, peak)
            self._counted += self._pending
        logical = peak.sum()
        self._logical = logical if self._logical is None else torch.maximum(self._logical, logical)
        self._pending = self._slots = self._most = 0

    def usage(self) -> Usage:
        """The totals so far."""
        self._settle()
        if self._sum is None or self._peak is None or self._logical is None:
            return Usage(0, [], [], 0, 0)
        mean = (self._sum / self._counted).tolist()
        logical = round(float(self._logical) * sum(self._widths))
        return Usage(self.calls, mean, self._peak.tolist(), logical, self.physical)


def _bytes(layer: CacheLayer) -> int:
    """Of the key and value of one slot, all kv heads."""
    both = [t for t in (layer.keys, layer.values) if t is not None]
    return sum(t.shape[1] * t.shape[-1] * t.element_size() for t in both)
