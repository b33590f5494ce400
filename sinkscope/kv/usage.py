"""How much a cache held, in tokens and in bytes, with and without holes, and how much of it decoding steps read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.engine.run import Run
from sinkscope.kv.cache import CacheLayer
from sinkscope.models.windows import ChunkWindow
from sinkscope.results.notation import count_of


@dataclass(frozen=True)
class Usage:
    """What one cache held, over all counted calls. Lists have a number for each row, the mean over layers and kv heads.

    Attributes:
        decoding_tokens: Largest number of cached tokens after a decoding step. Empty if there was no step.
        decoding_bytes: Largest number of bytes allocated after a decoding step, as in `physical_bytes`.
        stock_bytes: Bytes of keys and values in the model's own cache after the last call, which in a layer with a
            sliding window holds the window alone.
        mean_tokens: Mean number of cached tokens after a call.
        peak_tokens: Largest number of cached tokens after a call: as a rule those of the prompt, which is read whole.
        physical_bytes: Peak number of bytes allocated for keys and values, including holes, padding, room for the next
            tokens, working copies, and the latest queries if a policy keeps these.
        read_tokens: Number of tokens that the longest row has read, whether still held or not.
        mean_read: Number of tokens that a decoding step attended to, its own included, averaged over steps. Empty if
            there was no step.
        mean_held: Number of tokens that the cache held in these steps, averaged over them.
    """

    decoding_tokens: list[float]
    decoding_bytes: int
    stock_bytes: int
    mean_tokens: list[float]
    peak_tokens: list[float]
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
    """

    layers: int
    held: Float[Tensor, " row"]
    read: Float[Tensor, " row"]

    @classmethod
    def by(cls, layers: Sequence[CacheLayer], windows: Sequence[int | None]) -> HeldTokens:
        """Return what layers hold, whose decoder layers may have sliding windows; this does not wait for the device."""
        first = layers[0].keys
        held: Tensor | int = 0
        read: Tensor | int = 0
        for kv in layers:
            here = kv.keys.shape[-2] if kv.gapless else _held(kv, first.device)
            window = windows[kv.number]
            read = read + (here if window is None else _within(kv, window, first.device))
            if kv.whole_layer is not None:  # the layer is a copy of a part
                here = _held(kv.whole_layer, first.device) + kv.seen - kv.whole_layer.seen
            held = held + here
        rows = first.shape[:1]
        return cls(len(layers), torch.as_tensor(held).expand(rows), torch.as_tensor(read).expand(rows))

    def held_by_row(self) -> Float[Tensor, " row"]:
        """Return tokens of each row, the mean over layers."""
        return self.held.cpu().double() / self.layers

    def read_by_row(self) -> Float[Tensor, " row"]:
        """Return tokens of each row to which a query could attend, the mean over layers."""
        return self.read.cpu().double() / self.layers


def _held(layer: CacheLayer, device: torch.device) -> Float[Tensor, " row"] | int:
    """Tokens of each row in a layer: a plain number if there are no holes."""
    slots = layer.keys.shape[-2]
    if layer.gapless:
        return slots
    return slots - layer.holes().to(device)


def _within(layer: CacheLayer, window: int, device: torch.device) -> Float[Tensor, " row"] | int:
    """Tokens of each row in a layer that its newest query sees, its own included."""
    if layer.gapless and layer.slots == layer.seen and not isinstance(window, ChunkWindow):
        return min(layer.slots, window)
    pos = layer.pos
    newest = pos.amax((1, 2))[:, None, None]
    if isinstance(window, ChunkWindow):
        begin = newest - newest % window
    else:
        begin = newest - window + 1
    return ((pos >= 0) & (pos >= begin)).sum(-1).float().mean(1).to(device)


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


_NO_ROWS = torch.zeros(0, dtype=torch.double)


@dataclass
class TokenCount:
    """Tokens of each row over several calls, for as long as there are as many rows; with others it starts again.

    Attributes:
        calls: Number of calls.
        held: Sum of the tokens that were held.
        read: Sum of those to which a query could attend.
        peak: The largest number that was held.
        bytes: The largest number of bytes.
    """

    calls: int = 0
    held: Float[Tensor, " row"] = _NO_ROWS
    read: Float[Tensor, " row"] = _NO_ROWS
    peak: Float[Tensor, " row"] = _NO_ROWS
    bytes: int = 0

    def add(self, tokens: HeldTokens, used: int) -> None:
        """Count the tokens of each row after a call, and the bytes in use."""
        held = tokens.held_by_row()
        if len(self.held) != len(held):  # nobody knows which row became which
            self.calls = 0
            self.held = self.read = self.peak = torch.zeros_like(held)
        self.calls += 1
        self.held = self.held + held
        self.read = self.read + tokens.read_by_row()
        self.peak = self.peak.maximum(held)
        self.bytes = max(self.bytes, used)


_WAITING = 64
"""Calls after which what they held is added up, for which an accelerator has to be waited for."""


class Meter:
    """Counts tokens and bytes of one cache, in a memory that does not grow with the number of calls.

    Args:
        windows: Sliding window of each decoder layer, if it has one: what it hides is held and not read.
        processes: Number of processes that hold as many heads of the model each.
    """

    def __init__(self, windows: Sequence[int | None], processes: int = 1) -> None:
        self._windows = windows
        self._processes = processes
        self._waiting: list[tuple[HeldTokens, int, bool]] = []
        self._token_bytes: dict[int, int] = {}  # by layer
        self._rows = self._seen = self._most_seen = 0
        self._all, self._decoding = TokenCount(), TokenCount()

    def take(self, rows: Tensor) -> Meter:
        """Return itself: it stays with its cache, whatever the rows do."""
        return self

    def note(self, layers: list[CacheLayer], beside: int, *, decodes: bool) -> None:
        """Count what layers hold after a call, and the bytes `beside` them, if the call appended anything."""
        first = layers[0]
        if first.columns is None or not first.keys.shape[-2]:
            return
        if not self._token_bytes:
            for kv in layers:
                self._token_bytes[kv.number] = kv.keys[0, :, :1].nbytes + kv.values[0, :, :1].nbytes
        self._rows = len(first.keys)
        self._seen = first.columns.seen
        self._most_seen = max(self._most_seen, self._seen)
        used = beside
        for kv in layers:
            for part in (kv, kv.whole_layer):
                if part is not None:
                    memory = part if part.room is None else part.room
                    used += memory.keys.nbytes + memory.values.nbytes
        self._waiting.append((HeldTokens.by(layers, self._windows), used, decodes))
        if len(self._waiting) >= _WAITING:
            self._add_up()

    def _add_up(self) -> None:
        for tokens, used, decodes in self._waiting:
            self._all.add(tokens, used)
            if decodes:
                self._decoding.add(tokens, used)
        self._waiting.clear()

    def usage(self) -> Usage | None:
        """Return the totals so far; None if there was no call."""
        self._add_up()
        every = self._all
        decoding = self._decoding
        if not every.calls:
            return None
        stock = 0
        for number, token_bytes in self._token_bytes.items():
            window = self._windows[number]
            stock += token_bytes * (self._seen if window is None else min(self._seen, window - 1))
        return Usage(
            decoding_tokens=decoding.peak.tolist(),
            decoding_bytes=decoding.bytes * self._processes,
            stock_bytes=self._rows * stock * self._processes,
            mean_tokens=(every.held / every.calls).tolist(),
            peak_tokens=every.peak.tolist(),
            physical_bytes=every.bytes * self._processes,
            read_tokens=self._most_seen,
            mean_read=(decoding.read / decoding.calls).tolist(),
            mean_held=(decoding.held / decoding.calls).tolist(),
        )


def held_summary(name: str, run: Run) -> str:
    """Return a sentence: the tokens that the run's caches held while decoding, and their bytes beside the model's."""
    usages: list[Usage] = run.usage
    if not usages:
        return f"{name} has read nothing yet."
    read = count_of(max(usage.read_tokens for usage in usages), "token")
    stock = _megabytes(max(usage.stock_bytes for usage in usages))
    decoding = [usage for usage in usages if usage.decoding_tokens]
    if not decoding:
        return f"{name} read {read} ({stock}) and acts when the first generated token follows."
    most = max(max(usage.decoding_tokens) for usage in decoding)
    held = _megabytes(max(usage.decoding_bytes for usage in decoding))
    return (
        f"{name} held at most {most:,.0f} of {read} while it generated: {held}, where the model's own cache holds "
        f"{stock}."
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.3g} MB"
