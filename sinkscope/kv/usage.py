"""How much a cache held, in tokens and in bytes, with and without holes, and how much of it decoding steps read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sinkscope.engine.run import Run
from sinkscope.models.windows import ChunkWindow
from sinkscope.results.notation import count_of


@dataclass(frozen=True)
class Usage:
    """What one cache held while it decoded. Lists have a number for each row, the mean over layers and kv heads.

    Attributes:
        decoding_tokens: Largest number of cached tokens after a decoding step. Empty if there was no step.
        decoding_bytes: Largest number of bytes allocated for keys and values after a decoding step, including holes,
            padding, room for the next tokens, working copies, and the latest queries if a policy keeps these.
        stock_bytes: Bytes of keys and values in the model's own cache after the last call, which in a layer with a
            sliding window holds the window alone.
        read_tokens: Number of tokens that the longest row has read, whether still held or not.
        mean_read: Number of tokens that a decoding step attended to, its own included, averaged over steps. Empty if
            there was no step.
        mean_held: Number of tokens that the cache held in these steps, averaged over them.
    """

    decoding_tokens: list[float]
    decoding_bytes: int
    stock_bytes: int
    read_tokens: int
    mean_read: list[float]
    mean_held: list[float]


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
