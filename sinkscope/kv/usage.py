"""How much a cache held, in tokens and in bytes, with and without holes, and how much of it decoding steps read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.edit.base import Run
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
        mean_read: For each row, number of tokens that a decoding step attended to, its own included, averaged over
            steps, layers and kv heads. Empty if nobody asked for it (`Session.count_reads`), or there was no step.
        in_parts: Whether a step worked on a copy of chosen tokens.
    """

    calls: int
    mean_tokens: list[float]
    peak_tokens: list[float]
    logical_bytes: int
    physical_bytes: int
    read_tokens: int
    mean_read: list[float]
    in_parts: bool = False


@dataclass(eq=False)
class TokenCount:
    """Counts of each row over calls, summed over layers: plain numbers while they are the same for all rows.

    Attributes:
        calls: Number of calls.
        total: Sum over calls.
        peak: Largest count of one call.
    """

    calls: int = 0
    total: Tensor | int = 0
    peak: Tensor | int = 0

    def add(self, tokens: Float[Tensor, " row"] | int) -> None:
        """Count a call."""
        self.calls += 1
        self.total = self.total + tokens
        self.peak = _larger(self.peak, tokens)


@dataclass(eq=False)
class Meter:
    """Counts tokens and bytes of one cache. It does not wait for the device until `usage` is called."""

    calls: int = 0
    physical_bytes: int = 0
    read_tokens: int = 0
    in_parts: bool = False
    _rows: int = 0
    _held: TokenCount = field(default_factory=TokenCount)
    _read: TokenCount = field(default_factory=TokenCount)
    _largest: Tensor | int = 0  # bytes of the cached tokens of all rows, times the number of layers
    _slot_bytes: list[int] = field(default_factory=list)
    _heads: int = 1  # kv heads of a layer that are here

    def note(self, layers: list[CacheLayer], counts_reads: bool = False) -> None:
        """Count what the layers hold after a call and, if wanted, what a query of it could attend to."""
        first = layers[0]
        if not first.slots:
            return
        rows = len(first.keys)
        if rows != self._rows:  # nobody knows which became which: tokens are counted from here on
            self._rows, self._held, self._read = rows, TokenCount(), TokenCount()
        self.calls += 1
        self.read_tokens = max(self.read_tokens, first.seen)
        if not self._slot_bytes:
            self._slot_bytes = [_slot_bytes(kv) for kv in layers]
            self._heads = first.keys.shape[1]
        held: Tensor | int = 0
        read: Tensor | int = 0
        allocated = 0
        for kv, slot_bytes in zip(layers, self._slot_bytes, strict=True):
            whole = kv.aside or kv  # a copy of a part is only allocated
            allocated += kv.allocated * slot_bytes
            if whole is not kv:
                allocated += whole.allocated * slot_bytes
                self.in_parts = True
            held = held + whole.keys.shape[-2] + kv.seen - whole.seen
            if not whole.gapless:
                held = held - whole.holes().to(first.keys.device)
            if counts_reads and kv.complete:
                read = read + kv.slots
            elif counts_reads:
                read = read + kv.readable.sum(-1).float().mean(1).to(first.keys.device)
        self.physical_bytes = max(self.physical_bytes, rows * allocated)
        self._held.add(held)
        if counts_reads:
            self._read.add(read)
        of_all_rows = rows * held if isinstance(held, int) else held.double().sum()
        self._largest = _larger(self._largest, of_all_rows * sum(self._slot_bytes))

    def usage(self, kv_heads: int | None = None) -> Usage:
        """The totals so far; there was a call. Bytes are those of `kv_heads` heads; None: of those that are here."""
        layers = len(self._slot_bytes)
        processes = 1 if kv_heads is None else kv_heads // self._heads
        read: list[float] = []
        if self._read.calls:
            read = self._by_row(self._read.total, self._read.calls)
        return Usage(
            calls=self.calls,
            mean_tokens=self._by_row(self._held.total, self._held.calls),
            peak_tokens=self._by_row(self._held.peak, 1),
            logical_bytes=round(float(self._largest) / layers) * processes,
            physical_bytes=self.physical_bytes * processes,
            read_tokens=self.read_tokens,
            mean_read=read,
            in_parts=self.in_parts,
        )

    def _by_row(self, tokens: Tensor | int, calls: int) -> list[float]:
        """Tokens of each row, from a sum over layers and calls."""
        return (torch.as_tensor(tokens).float() / len(self._slot_bytes) / calls).expand(self._rows).tolist()


def _larger(one: Tensor | int, other: Tensor | int) -> Tensor | int:
    """The larger number, or those of each row; plain as long as both are."""
    if isinstance(one, int) and isinstance(other, int):
        return max(one, other)
    return torch.maximum(torch.as_tensor(one), torch.as_tensor(other))


def _slot_bytes(layer: CacheLayer) -> int:
    """Bytes of the keys and values of one slot, all kv heads together."""
    return layer.keys[0, :, :1].nbytes + layer.values[0, :, :1].nbytes


def tokens_read(run: Run) -> list[list[float]]:
    """Tokens that a decoding step attends to, including its own, for each cache of the run and each of its rows.

    They are averaged over steps, layers and kv heads. The list is empty if the run has no `Progressive` or `LoopServe`.
    """
    return [usage.mean_read for usage in run.usage if usage.mean_read]
