"""How much a cache held, in tokens and in bytes, with and without holes, and how much of it decoding steps read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.engine.run import Run
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.latest_queries import LatestQueries
from sinkscope.models.windows import ChunkWindow
from sinkscope.results.notation import count_of


@dataclass(frozen=True)
class Usage:
    """What one cache held, over all counted calls. Lists have a number for each row, the mean over layers and kv heads.

    Attributes:
        calls: Number of forward calls.
        decoding_tokens: Largest number of cached tokens after a decoding step. Empty if there was no step.
        decoding_bytes: Largest number of bytes allocated after a decoding step, as in `physical_bytes`.
        stock_bytes: Bytes of keys and values in the model's own cache after the last call, which in a layer with a
            sliding window holds the window alone.
        mean_tokens: Mean number of cached tokens after a call.
        peak_tokens: Largest number of cached tokens after a call: as a rule those of the prompt, which is read whole.
        logical_bytes: Peak number of bytes in keys and values of cached tokens, summed over rows and layers.
        physical_bytes: Peak number of bytes allocated for them, including holes, padding, room for the next tokens,
            working copies, and the latest queries if a policy keeps these.
        read_tokens: Number of tokens that the longest row has read, whether still held or not.
        mean_read: Number of tokens that a decoding step attended to, its own included, averaged over steps. Empty if
            there was no step.
        mean_held: Number of tokens that the cache held in these steps, averaged over them.
    """

    calls: int
    decoding_tokens: list[float]
    decoding_bytes: int
    stock_bytes: int
    mean_tokens: list[float]
    peak_tokens: list[float]
    logical_bytes: int
    physical_bytes: int
    read_tokens: int
    mean_read: list[float]
    mean_held: list[float]


class HeldTokens(NamedTuple):
    """The tokens that a cache holds after a call.

    Attributes:
        layers: Number of layers.
        held: Tokens of each row, summed over layers.
        read: Those of them to which a query of the call could attend.
        bytes: Bytes in use.
        decodes: Whether the call read a generated token.
    """

    layers: int
    held: Float[Tensor, " row"]
    read: Float[Tensor, " row"]
    bytes: int = 0
    decodes: bool = False

    @classmethod
    def by(cls, layers: Sequence[CacheLayer], windows: Sequence[int | None] = ()) -> HeldTokens:
        """Return what the layers of a cache hold; this does not wait for the device.

        Args:
            layers: The layers.
            windows: Sliding window of each decoder layer, if it has one.
        """
        first = layers[0]
        held: Tensor | int = 0
        read: Tensor | int = 0
        for kv in layers:
            here = kv.keys.shape[-2] if kv.gapless else _held(kv, first)
            window = windows[kv.number] if windows else None
            read = read + (here if window is None else _within(kv, window, first))
            if kv.whole_layer is not None:  # the layer is a copy of a part
                here = _held(kv.whole_layer, first) + kv.seen - kv.whole_layer.seen
            held = held + here
        rows = first.keys.shape[:1]
        return cls(len(layers), torch.as_tensor(held).expand(rows), torch.as_tensor(read).expand(rows))

    def held_by_row(self) -> Float[Tensor, " row"]:
        """Return tokens of each row, the mean over layers."""
        return self.held.cpu().double() / self.layers

    def read_by_row(self) -> Float[Tensor, " row"]:
        """Return tokens of each row to which a query could attend, the mean over layers."""
        return self.read.cpu().double() / self.layers


@dataclass
class TokenCount:
    """Tokens of each row over several calls, for as long as there are as many rows; with others it starts again.

    Attributes:
        calls: Number of calls.
        held: Sum of the tokens that were held.
        read: Sum of those to which a query could attend.
        peak: The largest number that was held.
        most: The largest number that all rows held together.
        bytes: The largest number of bytes.
    """

    calls: int = 0
    held: Float[Tensor, " row"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.double))
    read: Float[Tensor, " row"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.double))
    peak: Float[Tensor, " row"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.double))
    most: float = 0.0
    bytes: int = 0

    def add(self, tokens: HeldTokens) -> None:
        """Count the tokens of each row after a call, and the bytes in use."""
        held = tokens.held_by_row()
        if len(self.held) != len(held):  # nobody knows which row became which
            self.calls = 0
            self.held = self.read = self.peak = torch.zeros_like(held)
        self.calls += 1
        self.held = self.held + held
        self.read = self.read + tokens.read_by_row()
        self.peak = self.peak.maximum(held)
        self.most = max(self.most, float(held.sum()))
        self.bytes = max(self.bytes, tokens.bytes)


_WAITING = 64
"""Calls after which what they held is added up, for which an accelerator has to be waited for."""


class Meter:
    """Counts tokens and bytes of one cache, in a memory that does not grow with the number of calls.

    Args:
        windows: Sliding window of each decoder layer, if it has one: what it hides is held and not read.
    """

    def __init__(self, windows: Sequence[int | None] = ()) -> None:
        self.calls = 0
        self._windows = windows  # of each decoder layer
        self._waiting: list[HeldTokens] = []
        self._slot_bytes: dict[int, int] = {}  # by layer
        self._heads = 1  # kv heads of a layer that are here
        self._rows = self._seen = self._most_seen = 0
        self._all, self._decoding = TokenCount(), TokenCount()

    def take(self, rows: Tensor) -> Meter:
        """Return itself: it stays with its cache, whatever the rows do."""
        return self

    def note(self, layers: list[CacheLayer], *, decodes: bool = False, queries: LatestQueries | None = None) -> None:
        """Count what the layers hold after a call.

        Args:
            layers: The layers.
            decodes: Whether the call read a generated token.
            queries: The latest queries, which are kept beside them.
        """
        first = layers[0]
        if first.columns is None or not first.keys.shape[-2]:
            return
        if not self._slot_bytes:
            self._slot_bytes = {kv.number: _slot_bytes(kv) for kv in layers}
        self.calls += 1
        self._rows, self._heads = first.keys.shape[:2]
        self._seen = first.columns.seen
        self._most_seen = max(self._most_seen, self._seen)
        allocated = 0
        for kv in layers:
            room = kv.room
            slots = kv.keys.shape[-2] if room is None else room.keys.shape[-2]
            if kv.whole_layer is not None:
                slots += allocated_slots(kv.whole_layer)
            allocated += slots * self._slot_bytes[kv.number]
        used = self._rows * allocated
        if queries is not None:
            used += queries.nbytes
        self._waiting.append(HeldTokens.by(layers, self._windows)._replace(bytes=used, decodes=decodes))
        if len(self._waiting) >= _WAITING:
            self._add_up()

    def _add_up(self) -> None:
        for call in self._waiting:
            self._all.add(call)
            if call.decodes:
                self._decoding.add(call)
        self._waiting.clear()

    def usage(self, kv_heads: int | None = None) -> Usage:
        """Return the totals so far; there was a call.

        Args:
            kv_heads: Heads whose bytes are counted; None: those that are here.
        """
        self._add_up()
        processes = 1 if kv_heads is None else kv_heads // self._heads
        stock = 0
        for number, slot_bytes in self._slot_bytes.items():
            window = self._windows[number] if self._windows else None
            stock += slot_bytes * (self._seen if window is None else min(self._seen, window - 1))
        every = self._all
        decoding = self._decoding
        return Usage(
            calls=self.calls,
            decoding_tokens=decoding.peak.tolist(),
            decoding_bytes=decoding.bytes * processes,
            stock_bytes=self._rows * stock * processes,
            mean_tokens=(every.held / every.calls).tolist(),
            peak_tokens=every.peak.tolist(),
            logical_bytes=round(every.most * sum(self._slot_bytes.values())) * processes,
            physical_bytes=every.bytes * processes,
            read_tokens=self._most_seen,
            mean_read=(decoding.read / decoding.calls).tolist(),
            mean_held=(decoding.held / decoding.calls).tolist(),
        )


def _held(layer: CacheLayer, first: CacheLayer) -> Float[Tensor, " row"] | int:
    """Tokens of each row in a layer, on the device of the first one: a plain number if there are no holes."""
    slots = layer.keys.shape[-2]
    if layer.gapless:
        return slots
    return slots - layer.holes().to(first.keys.device)


def _within(layer: CacheLayer, window: int, first: CacheLayer) -> Float[Tensor, " row"] | int:
    """Tokens of each row in a layer that its newest query sees, its own included."""
    if layer.gapless and layer.slots == layer.seen and not isinstance(window, ChunkWindow):
        return min(layer.slots, window)
    pos = layer.pos
    newest = pos.amax((1, 2))[:, None, None]
    begin = newest - newest % window if isinstance(window, ChunkWindow) else newest - window + 1
    return ((pos >= 0) & (pos >= begin)).sum(-1).float().mean(1).to(first.keys.device)


def full_read(tokens: int, windows: Sequence[int | None]) -> float:
    """Return how many of so many tokens the newest one attends to with a full cache, itself too; mean over layers."""
    seen: list[int] = []
    for window in windows:
        count = tokens
        if isinstance(window, ChunkWindow):
            count = (tokens - 1) % window + 1
        elif window is not None:
            count = min(tokens, window)
        seen.append(count)
    return sum(seen) / len(seen)


def allocated_slots(layer: CacheLayer) -> int:
    """Return the number of slots in memory: those in use plus room for new tokens."""
    return layer.keys.shape[-2] if layer.room is None else layer.room.allocated


def _slot_bytes(layer: CacheLayer) -> int:
    """Bytes of the keys and values of one slot, all kv heads together."""
    return layer.keys[0, :, :1].nbytes + layer.values[0, :, :1].nbytes


def tokens_read(run: Run) -> list[list[float]]:
    """Return tokens that a decoding step attends to, including its own, for each cache of the run and each of its rows.

    They are averaged over steps, layers and kv heads. The list is empty without a policy, and where no step was taken.
    """
    return [usage.mean_read for usage in run.usage if usage.mean_read]


def held_summary(name: str, run: Run) -> str:
    """Return a sentence: the tokens that the run's caches held while decoding, and their bytes beside the model's."""
    usages: list[Usage] = run.usage
    if not usages:
        return f"{name} has read nothing yet."
    read_tokens = max(usage.read_tokens for usage in usages)
    stock = _megabytes(max(usage.stock_bytes for usage in usages))
    decoding = [usage for usage in usages if usage.decoding_tokens]
    if not decoding:
        return (
            f"{name} read {count_of(read_tokens, 'token')} ({stock}) and acts when the first generated token follows."
        )
    most = max(max(usage.decoding_tokens) for usage in decoding)
    held = _megabytes(max(usage.decoding_bytes for usage in decoding))
    return (
        f"{name} held at most {most:,.0f} of {count_of(read_tokens, 'token')} while it generated: {held}, where the "
        f"model's own cache holds {stock}."
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.3g} MB"
