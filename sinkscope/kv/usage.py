"""How much a cache held, in tokens and in bytes, with and without holes, and how much of it decoding steps read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.edit.base import Run
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.growing_tensor import Buffer


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
    """

    calls: int
    mean_tokens: list[float]
    peak_tokens: list[float]
    logical_bytes: int
    physical_bytes: int
    read_tokens: int
    mean_read: list[float]


class HeldInCall(NamedTuple):
    """What a cache holds after a call.

    Attributes:
        rows: Number of rows.
        seen: Number of tokens that were appended to a row.
        tokens: Tokens of each row, summed over layers: a plain number if it is the same for all rows.
        read: Those of them to which a query of the call could attend.
        counts_read: Whether that belongs to what decoding steps read.
        bytes: Bytes that are allocated.
    """

    rows: int
    seen: int
    tokens: Float[Tensor, " row"] | int
    read: Float[Tensor, " row"] | int
    counts_read: bool
    bytes: int


class Meter:
    """Counts tokens and bytes of one cache. It does not wait for the device until `usage` is called."""

    def __init__(self) -> None:
        self.calls: list[HeldInCall] = []
        self._slot_bytes: list[int] = []
        self._heads = 1  # kv heads of a layer that are here

    def note(self, layers: list[CacheLayer], counts_read: bool = False) -> None:
        """Count what the layers hold after a call; `counts_read` if a decoding step read it and that is wanted."""
        first = layers[0]
        if not first.slots:
            return
        if not self.calls:
            self._slot_bytes = [_slot_bytes(kv) for kv in layers]
            self._heads = first.keys.shape[1]
        held: Tensor | int = 0
        read: Tensor | int = 0
        allocated = 0
        for kv, slot_bytes in zip(layers, self._slot_bytes, strict=True):
            here = _held(kv, first)
            read = read + here
            allocated += allocated_slots(kv) * slot_bytes
            if kv.aside is not None:  # the layer is a copy of a part, which is only allocated
                here = _held(kv.aside, first) + kv.seen - kv.aside.seen
                allocated += allocated_slots(kv.aside) * slot_bytes
            held = held + here
        rows = first.keys.shape[0]
        self.calls.append(HeldInCall(rows, first.seen, held, read, counts_read, rows * allocated))

    def by_call(self, since: int = 0) -> tuple[Float[Tensor, "call row"], Float[Tensor, "call row"]]:
        """Tokens of each row after every call, and those that its queries could read: means over layers and heads."""
        layers = len(self._slot_bytes)
        held = torch.stack([_by_row(call.tokens, call.rows) for call in self.calls[since:]])
        read = torch.stack([_by_row(call.read, call.rows) for call in self.calls[since:]])
        return held / layers, read / layers

    def usage(self, kv_heads: int | None = None) -> Usage:
        """The totals so far; there was a call. Bytes are those of `kv_heads` heads; None: of those that are here."""
        calls, layers = self.calls, len(self._slot_bytes)
        rows = calls[-1].rows
        processes = 1 if kv_heads is None else kv_heads // self._heads
        # Since the number of rows last changed: nobody knows which became which.
        since = max((number for number, call in enumerate(calls, 1) if call.rows != rows), default=0)
        held, read = self.by_call(since)
        steps = [call.counts_read for call in calls[since:]]
        most = max(float(_by_row(call.tokens, call.rows).sum()) for call in calls)
        return Usage(
            calls=len(calls),
            mean_tokens=held.mean(0).tolist(),
            peak_tokens=held.amax(0).tolist(),
            logical_bytes=round(most * sum(self._slot_bytes) / layers) * processes,
            physical_bytes=max(call.bytes for call in calls) * processes,
            read_tokens=max(call.seen for call in calls),
            mean_read=read[steps].mean(0).tolist() if any(steps) else [],
        )


def _by_row(tokens: Tensor | int, rows: int) -> Float[Tensor, " row"]:
    """Tokens of each row."""
    return torch.as_tensor(tokens).cpu().double().expand(rows)


def _held(layer: CacheLayer, first: CacheLayer) -> Float[Tensor, " row"] | int:
    """Tokens of each row in a layer, on the device of the first one: a plain number if there are no holes."""
    slots = layer.keys.shape[-2]
    if layer.gapless:
        return slots
    return slots - layer.holes().to(first.keys.device)


def allocated_slots(layer: CacheLayer) -> int:
    """Number of slots in memory: those in use plus room for new tokens."""
    last = layer.grown.get("keys")
    if isinstance(last, Buffer):
        return last.allocated
    return layer.keys.shape[-2]


def _slot_bytes(layer: CacheLayer) -> int:
    """Bytes of the keys and values of one slot, all kv heads together."""
    return layer.keys[0, :, :1].nbytes + layer.values[0, :, :1].nbytes


def tokens_read(run: Run) -> list[list[float]]:
    """Tokens that a decoding step attends to, including its own, for each cache of the run and each of its rows.

    They are averaged over steps, layers and kv heads. The list is empty if the run has no `Progressive` or `LoopServe`.
    """
    return [usage.mean_read for usage in run.usage if usage.mean_read]


def held_summary(name: str, run: Run) -> str:
    """One sentence on how many tokens the run's caches held, out of how many were read."""
    usages: list[Usage] = run.usage
    if not usages:
        return f"{name} has read nothing yet."
    read_tokens = max(usage.read_tokens for usage in usages)
    peak_tokens = max(max(usage.peak_tokens) for usage in usages)
    size = f"{max(usage.logical_bytes for usage in usages) / 1e6:,.3g} MB of keys and values"
    return f"{name} held at most {peak_tokens:,.0f} of {read_tokens:,} tokens ({size})."
