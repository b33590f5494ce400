"""How much a cache held: tokens, and bytes with and without holes."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_, mul

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
        physical_bytes: most bytes allocated for them: holes, padding, room for the next tokens,
            and copies that are read instead, included.
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
    _counts: list[Tensor] = field(default_factory=list)  # the layers' own counts of them; empty: there are none
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
        if not self._widths or self._widths[0] != _bytes(first):  # rebased keys are float32
            self._settle()
            self._widths = [_bytes(layer) for layer in layers]
        self.calls += 1
        # What a copy was taken of is what is held; the copy is only allocated.
        wholes = [layer.aside or layer for layer in layers]
        slots = [whole.slots + layer.seen - whole.seen for layer, whole in zip(layers, wholes, strict=True)]
        allocated = [layer.allocated + (layer.aside.allocated if layer.aside else 0) for layer in layers]
        self.physical = max(self.physical, batch * sum(map(mul, allocated, self._widths)))
        counts = [] if all(layer.whole for layer in wholes) else [layer.holes() for layer in wholes]
        same = len(counts) == len(self._counts) and all(map(is_, counts, self._counts))
        if self._lost is None or len(self._lost) != batch or not same:
            self._settle()
            device, self._counts = first.keys.device, counts
            self._lost = torch.stack([n.to(device) for n in counts]).sum(0) if counts else torch.zeros(batch).to(device)
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
        logical = peak.double().sum() * sum(self._widths)  # bytes
        self._logical = logical if self._logical is None else torch.maximum(self._logical, logical)
        self._pending = self._slots = self._most = 0

    def usage(self) -> Usage:
        """The totals so far."""
        self._settle()
        if self._sum is None or self._peak is None or self._logical is None:
            return Usage(0, [], [], 0, 0)
        mean = (self._sum / self._counted).tolist()
        return Usage(self.calls, mean, self._peak.tolist(), round(float(self._logical)), self.physical)


def _bytes(layer: CacheLayer) -> int:
    """Of the key and value of one slot, all kv heads."""
    both = [t for t in (layer.keys, layer.values) if t is not None]
    return sum(t.shape[1] * t.shape[-1] * t.element_size() for t in both)
