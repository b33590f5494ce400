"""Detectors of loops that others use, written from their public rules; `sinkscope loops compare` runs them.

Each takes a text and returns the number of characters after which it would have stopped the generation, or None. Tokens
are the words of `sinkscope.loops.outputs.split` for all of them.
"""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Callable, Sequence

from sinkscope.loops.check import Verdict, checked_output
from sinkscope.loops.monitor import MonitorSettings
from sinkscope.loops.outputs import TokenRecord, number, spans

Detector = Callable[[str], int | None]


def exact_copies(
    text: str, smallest: int, largest: int, copies: int, tokens: int = 0, every: int = 1, after: int = 0
) -> int | None:
    """The last tokens are so many exact copies of a sequence of `smallest` to `largest` tokens.

    Args:
        text: The text.
        smallest: Shortest sequence.
        largest: Longest sequence.
        copies: Number of copies.
        tokens: Number of tokens that the copies must have.
        every: Number of tokens between two looks.
        after: First token at which it looks.
    """
    words = spans(text)
    ids = number(word for word, _ in words)
    equal = [0] * (largest + 1)  # for each period: how many of the last tokens equal the one a period before
    for position, token in enumerate(ids):
        for period in range(smallest, min(largest, position) + 1):
            equal[period] = equal[period] + 1 if ids[position - period] == token else 0
        if position + 1 < after or (position + 1) % every:
            continue
        for period in range(smallest, min(largest, position) + 1):
            if equal[period] >= max(copies * period, tokens) - period:
                return words[position][1]
    return None


def vllm(text: str) -> int | None:
    """VLLM's `repetition_detection` (vllm#35451) with 4 to 128 tokens and 4 copies, as vllm#52677 proposes."""
    return exact_copies(text, 4, 128, 4)


def vllm_short(text: str) -> int | None:
    """The same with 1 to 20 tokens and 3 copies, as vllm#40097 proposes for structured output."""
    return exact_copies(text, 1, 20, 3)


def llama_cpp(text: str) -> int | None:
    """llama.cpp's proposed `--repetition-detection` (llama.cpp#26039): 16 to 1,024 tokens, 4 copies."""
    return exact_copies(text, 16, 1024, 4)


def vllm_mlx(text: str) -> int | None:
    """vllm-mlx#723: 1 to 128 tokens, 3 copies of 48 tokens in all, at every 16th token from the 64th on."""
    return exact_copies(text, 1, 128, 3, 48, 16, 64)


def suffix(text: str, length: int = 48) -> int | None:
    """The last 48 tokens were there before."""
    words = spans(text)
    ids = number(word for word, _ in words)
    seen: set[tuple[int, ...]] = set()
    for end in range(length, len(ids) + 1):
        last = tuple(ids[end - length : end])
        if last in seen:
            return words[end - 1][1]
        seen.add(last)
    return None


def paragraphs(text: str) -> int | None:
    """8 of the last 12 paragraphs share half of their words with one of the 32 before them (senpi#1763).

    Paragraphs of fewer than 64 characters or 24 letters and digits do not count.
    """
    earlier: deque[frozenset[str]] = deque(maxlen=32)
    echoes: deque[bool] = deque(maxlen=12)
    for match in re.finditer(r"(?:[^\n]+\n?)+", text):
        paragraph = match[0]
        if len(paragraph) < 64 or sum(map(str.isalnum, paragraph)) < 24:
            continue
        words = frozenset(re.findall(r"\w+", paragraph.lower()))
        echoes.append(any(2 * len(words & other) >= len(words | other) for other in earlier))
        earlier.append(words)
        if len(echoes) == 12 and sum(echoes) >= 8:
            return match.end()
    return None


def compression(text: str, window: int = 1000, least: float = 2.4) -> int | None:
    """The last 1,000 characters compress by more than 2.4 times, the threshold of Whisper; a look every 50."""
    for end in range(window, len(text) + 1, 50):
        raw = text[end - window : end].encode()
        if len(raw) > least * len(zlib.compress(raw)):
            return end
    return None


def ours(text: str, verdicts: Sequence[Verdict] = ("loops", "looped", "suspicious")) -> int | None:
    """Where `check` finds a text to have one of the verdicts."""
    words = spans(text)
    record = TokenRecord("text", number(word for word, _ in words), text)
    result = checked_output(record, MonitorSettings())
    if result.verdict not in verdicts or result.detected is None:
        return None
    return words[result.detected - 1][1]


def ours_proved(text: str) -> int | None:
    """The same without suspicious texts."""
    return ours(text, ("loops", "looped"))


DETECTORS: dict[str, Detector] = {
    "sinkscope, loops": ours_proved,
    "sinkscope, loops or suspicious": ours,
    "vllm, 4 to 128, 4 copies": vllm,
    "vllm, 1 to 20, 3 copies": vllm_short,
    "llama.cpp, 16 to 1024, 4 copies": llama_cpp,
    "vllm-mlx, 1 to 128, 3 copies": vllm_mlx,
    "suffix of 48": suffix,
    "8 of 12 paragraphs": paragraphs,
    "compression above 2.4": compression,
}
