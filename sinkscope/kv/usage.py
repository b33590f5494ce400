"""How much a cache held, in tokens and in bytes, with and without holes, and how much of it decoding steps read."""

from __future__ import annotations

from dataclasses import dataclass

from sinkscope.engine.run import Run
from sinkscope.results.notation import count_of


@dataclass(frozen=True)
class Usage:
    """What one cache held while it decoded. Lists have a number for each row, the mean over layers and kv heads.

    Attributes:
        decoding_tokens: Largest number of cached tokens after a decoding step. Empty if there was no step.
        decoding_bytes: Largest number of bytes allocated for keys and values after a decoding step, including holes,
            padding, room for the next tokens, working copies, and the latest queries if a policy keeps these.
        read_tokens: Number of tokens that the longest row has read, whether still held or not.
        mean_held: Number of tokens that the cache held in these steps, averaged over them. Empty if there was no step.
        mean_read: Number of them that a step read, its own included; a sliding window may hide some of these.
    """

    decoding_tokens: list[float]
    decoding_bytes: int
    read_tokens: int
    mean_held: list[float]
    mean_read: list[float]


def held_summary(name: str, run: Run) -> str:
    """Return a sentence: the tokens that the run's caches held while decoding, and their bytes."""
    usages: list[Usage] = [usage for usage in run.usage if usage.decoding_tokens]
    if not usages:
        return f"{name} acts when the first generated token follows; there was none."
    read = count_of(max(usage.read_tokens for usage in usages), "token")
    most = max(max(usage.decoding_tokens) for usage in usages)
    held = max(usage.decoding_bytes for usage in usages) / 1e6
    return f"{name} held at most {most:,.0f} of {read} while it generated: {held:,.3g} MB."
