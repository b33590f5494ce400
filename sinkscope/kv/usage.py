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
            here = kv.keys.shape[-2]
            if not kv.gapless:
                here = here - kv.holes().to(first.device)
            window = windows[kv.number]
            seen = here
            if window is not None:
                is_plain = kv.gapless and kv.slot_positions is None and not isinstance(window, ChunkWindow)
                seen = min(kv.keys.shape[-2], window) if is_plain else _within(kv, window).to(first.device)
            read = read + seen
            whole = kv.whole_layer
            if whole is not None:  # the layer is a copy of a part
                here = whole.slots - whole.holes().to(first.device) + kv.seen - whole.seen
            held = held + here
        rows = first.shape[:1]
        held = torch.as_tensor(held, dtype=torch.double).expand(rows)
        return cls(len(layers), held, torch.as_tensor(read, dtype=torch.double).expand(rows))

    def held_by_row(self) -> Float[Tensor, " row"]:
        """Return tokens of each row, the mean over layers."""
        return self.held.cpu() / self.layers

    def read_by_row(self) -> Float[Tensor, " row"]:
        """Return tokens of each row to which a query could attend, the mean over layers."""
        return self.read.cpu() / self.layers


def _within(layer: CacheLayer, window: int) -> Float[Tensor, " row"]:
    """Tokens of each row in a layer that its newest query sees, its own included."""
    pos = layer.pos
    newest = pos.amax((1, 2))[:, None, None]
    begin = newest - window + 1
    if isinstance(window, ChunkWindow):
        begin = newest - newest % window
    return ((pos >= 0) & (pos >= begin)).sum(-1).float().mean(1)


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


_NONE = torch.zeros(1, dtype=torch.double)


@dataclass
class TokenCount:
    """Tokens of each row over several calls, summed over layers.

    Attributes:
        calls: Number of calls.
        held: Sum of the tokens that were held.
        read: Sum of those to which a query could attend.
        peak: The largest number that was held.
        bytes: The largest number of bytes.
    """

    calls: int = 0
    held: Float[Tensor, " row"] = _NONE
    read: Float[Tensor, " row"] = _NONE
    peak: Float[Tensor, " row"] = _NONE
    bytes: int = 0


class Meter:
    """Counts tokens and bytes of one cache, in a memory that does not grow with the number of calls.

    Args:
        windows: Sliding window of each decoder layer, if it has one: what it hides is held and not read.
        processes: Number of processes that hold as many heads of the model each.
    """

    def __init__(self, windows: Sequence[int | None], processes: int = 1) -> None:
        self._windows = windows
        self._processes = processes
        self._token_bytes: dict[int, int] = {}  # by layer
        self._rows = self._seen = 0
        self._prompts, self._decoding = TokenCount(), TokenCount()

    def note(self, layers: list[CacheLayer], beside: int, *, decodes: bool) -> None:
        """Count what layers hold after a call, and the bytes `beside` them, if the call appended anything."""
        first = layers[0]
        if first.columns is None or not first.keys.shape[-2]:
            return
        if self._rows != len(first.keys):  # others: nobody knows which row became which
            self._prompts, self._decoding = TokenCount(), TokenCount()
        self._rows = len(first.keys)
        self._seen = first.columns.seen
        used = beside
        for kv in layers:
            if kv.number not in self._token_bytes:
                self._token_bytes[kv.number] = kv.keys[0, :, :1].nbytes + kv.values[0, :, :1].nbytes
            for part in (kv, kv.whole_layer):
                if part is not None:
                    memory = part if part.room is None else part.room
                    used += memory.keys.nbytes + memory.values.nbytes
        tokens = HeldTokens.by(layers, self._windows)
        count = self._decoding if decodes else self._prompts
        count.calls += 1
        count.held = count.held.to(tokens.held) + tokens.held
        count.read = count.read.to(tokens.read) + tokens.read
        count.peak = count.peak.to(tokens.held).maximum(tokens.held)
        count.bytes = max(count.bytes, used)

    @property
    def calls(self) -> int:
        """Number of calls that were counted."""
        return self._prompts.calls + self._decoding.calls

    def usage(self) -> Usage:
        """Return the totals so far."""
        prompts = self._prompts
        decoding = self._decoding
        layers = len(self._token_bytes)
        stock = 0
        for number, token_bytes in self._token_bytes.items():
            window = self._windows[number]
            stock += token_bytes * (self._seen if window is None else min(self._seen, window - 1))
        steps = layers * decoding.calls
        held = (prompts.held.cpu() + decoding.held.cpu()) / layers / self.calls
        peak = prompts.peak.cpu().maximum(decoding.peak.cpu()) / layers
        return Usage(
            decoding_tokens=(decoding.peak / layers).tolist() if steps else [],
            decoding_bytes=decoding.bytes * self._processes,
            stock_bytes=self._rows * stock * self._processes,
            mean_tokens=held.tolist(),
            peak_tokens=peak.tolist(),
            physical_bytes=max(prompts.bytes, decoding.bytes) * self._processes,
            read_tokens=self._seen,
            mean_read=(decoding.read / steps).tolist() if steps else [],
            mean_held=(decoding.held / steps).tolist() if steps else [],
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
