"""How much a cache held, in tokens and in bytes, with and without holes, and how much of it decoding steps read."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_

import torch
from jaxtyping import Float
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
class SteadyCalls:
    """Successive calls between which the number of holes did not change in any layer.

    Attributes:
        holes: Number of slots without a token, as counted by the layers; empty if there are no holes.
        row_holes: Number of empty slots of each row, summed over the layers.
        slot_bytes: Bytes per slot of each layer, all kv heads together.
        calls: Number of calls.
        slots: Number of slots of all layers, summed over the calls.
        most_slots: Largest number of slots in one call.
        key_dtype: Of the first layer.
    """

    holes: list[Tensor]
    row_holes: Float[Tensor, " batch"]
    slot_bytes: list[int]
    key_dtype: torch.dtype
    calls: int = 0
    slots: int = 0
    most_slots: int = 0

    def include(self, batch: int, holes: list[Tensor], key_dtype: torch.dtype) -> bool:
        """Whether a call belongs here. Rebased keys are float32, so the bytes of a slot may change too."""
        same_holes = len(holes) == len(self.holes) and all(map(is_, holes, self.holes))
        return same_holes and batch == len(self.row_holes) and key_dtype == self.key_dtype


@dataclass(eq=False)
class Meter:
    """Counts tokens and bytes. It does not wait for the device until `usage` is called.

    While the number of holes stays the same, as in most calls, calls are summed as plain numbers. A tensor operation
    per call would cost more than the count is worth.
    """

    calls: int = 0
    physical_bytes: int = 0
    read_tokens: int = 0
    _steady: SteadyCalls | None = None
    _counted_calls: int = 0  # those in the sum
    _token_sum: Float[Tensor, " batch"] | None = None
    _peak_tokens: Float[Tensor, " batch"] | None = None
    _logical_bytes: list[Tensor] = field(default_factory=list)

    def note(self, layers: list[CacheLayer]) -> None:
        """Count what the layers hold after a call."""
        first = layers[0]
        if not first.slots:
            return
        batch = len(first.keys)
        self.calls += 1
        self.read_tokens = max(self.read_tokens, first.seen)
        slots = 0
        holes: list[Tensor] = []
        for layer in layers:
            whole = layer.aside or layer  # a copy of a part is only allocated
            slots += whole.keys.shape[-2] + layer.seen - whole.seen
            if not whole.whole:
                holes.append(whole.holes())
        steady = self._steady
        if steady is None or not steady.include(batch, holes, first.keys.dtype):
            self._settle()
            row_holes = torch.zeros(batch, device=first.keys.device)
            if holes:
                row_holes = torch.stack([layer_holes.to(row_holes) for layer_holes in holes]).sum(0)
            steady = SteadyCalls(holes, row_holes, [_slot_bytes(layer) for layer in layers], first.keys.dtype)
            self._steady = steady
        allocated = 0
        for layer, slot_bytes in zip(layers, steady.slot_bytes, strict=True):
            allocated += layer.allocated * slot_bytes
            if layer.aside is not None:
                allocated += layer.aside.allocated * slot_bytes
        self.physical_bytes = max(self.physical_bytes, batch * allocated)
        steady.calls += 1
        steady.slots += slots
        steady.most_slots = max(steady.most_slots, slots)

    def _settle(self) -> None:
        """Bring the sums up to date before the number of holes changes."""
        steady = self._steady
        self._steady = None
        if steady is None:
            return
        layers = len(steady.slot_bytes)
        tokens = (steady.slots - steady.calls * steady.row_holes) / layers
        peak = (steady.most_slots - steady.row_holes) / layers
        logical = peak.double().sum() * sum(steady.slot_bytes)
        self._logical_bytes = [torch.stack([*self._logical_bytes, logical]).amax()]
        if self._token_sum is None or self._peak_tokens is None or len(tokens) % len(self._token_sum):
            self._counted_calls = 0  # the first calls, or rows were chosen and nobody knows which: count from here on
        else:
            repeats = len(tokens) // len(self._token_sum)  # each row may have become several: "row -> (row repeats)"
            tokens = tokens + self._token_sum.repeat_interleave(repeats)
            peak = torch.maximum(peak, self._peak_tokens.repeat_interleave(repeats))
        self._token_sum = tokens
        self._peak_tokens = peak
        self._counted_calls += steady.calls

    def usage(self) -> Usage:
        """The totals so far; there was a call."""
        self._settle()
        assert self._token_sum is not None and self._peak_tokens is not None
        return Usage(
            calls=self.calls,
            mean_tokens=(self._token_sum / self._counted_calls).tolist(),
            peak_tokens=self._peak_tokens.tolist(),
            logical_bytes=round(float(self._logical_bytes[0])),
            physical_bytes=self.physical_bytes,
            read_tokens=self.read_tokens,
        )


@dataclass(eq=False)
class DecodingReads:
    """Tokens of one cache that decoding steps attended to, per row, averaged over layers and kv heads.

    Attributes:
        steps: Number of steps counted.
        total: Tokens read in them.
    """

    steps: int = 0
    total: Float[Tensor, " batch"] | None = None

    def add(self, tokens: Float[Tensor, " batch"]) -> None:
        """Count a step."""
        if self.total is None or len(self.total) != len(tokens):  # rows may have been multiplied or chosen: start again
            self.steps = 1
            self.total = tokens
        else:
            self.steps += 1
            self.total = self.total + tokens


def _slot_bytes(layer: CacheLayer) -> int:
    """Bytes of the keys and values of one slot, all kv heads together."""
    kv_heads = layer.keys.shape[1]
    key_bytes = layer.keys.shape[-1] * layer.keys.element_size()
    value_bytes = layer.values.shape[-1] * layer.values.element_size()
    return kv_heads * (key_bytes + value_bytes)
