"""Common remedies for loops in the sampler, applied row by row so that padding and other rows have no influence.

The stock processors of transformers also see the left padding of a short row, and its sampling draws one random number
for all rows: in both cases a prompt's output depends on the batch it is in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import (
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
)

from sinkscope.kv.loopguard import LoopReporter, LoopStopper
from sinkscope.loops.monitor import MonitorSettings

RowProcessor = Callable[[Tensor, Tensor, int], Tensor]
"""(ids `[pos]` without padding, scores `[vocab]`, prompt tokens among the ids) -> scores `[vocab]`."""
BREAKERS = ("\n", ":", '"', "*")  # where DRY takes up its matching anew; the published defaults


@dataclass(frozen=True)
class WatchedRows:
    """What a stopper may read: the width of the prompts, the ids that end a row, and W."""

    width: int
    ends: tuple[int, ...]
    window: int


SAMPLERS: dict[str, Callable[[Any], RowProcessor]] = {
    "repetition-penalty": lambda tokenizer: stock(RepetitionPenaltyLogitsProcessor(1.1)),
    "presence-penalty": lambda tokenizer: presence(1.5),
    "no-repeat-4-gram": lambda tokenizer: stock(NoRepeatNGramLogitsProcessor(4)),
    "dry": lambda tokenizer: dry(0.8, 1.75, 2, dry_breakers(tokenizer)),
}
"""What each sampler of the table of methods does to the scores of a row, by the model's tokenizer."""


PATTERNS: dict[str, dict[str, int]] = {
    "stop-pattern": {},
    "stop-llama.cpp": {"shortest": 16, "longest": 1024, "times": 4, "tokens": 64},
    "stop-vllm-mlx": {"longest": 128, "times": 3, "tokens": 48},
}
"""What each stopper that knows patterns looks for; the last two are the rules of servers of these names."""


def stopper(name: str, rows: WatchedRows) -> tuple[list[Any], StoppingCriteria]:
    """Observing logits processors, and the criterion that stops rows: a pattern, or where `LoopGuard()` would prune."""
    if name in PATTERNS:
        return [], PatternStop(rows.width, **PATTERNS[name])
    settings = MonitorSettings(window=rows.window, relapse=rows.window)
    reporter = LoopReporter(settings, eos_token_id=rows.ends)
    return [reporter], LoopStopper(reporter=reporter)


class PerRow(LogitsProcessor):
    """Applies a separate processor to each row, without its padding.

    Args:
        rows: One processor per row.
        prompts: Number of prompt tokens per row, not counting padding.
        width: Width of the padded prompts.
    """

    def __init__(self, rows: Sequence[RowProcessor], prompts: Sequence[int], width: int) -> None:
        self._rows = rows
        self._prompts = prompts
        self._width = width

    def __call__(self, input_ids: Int[Tensor, "batch pos"], scores: Float[Tensor, "batch vocab"]) -> Any:
        """Scores of the next token."""
        return torch.stack(
            [
                row(ids[self._width - length :], values, length)
                for row, length, ids, values in zip(self._rows, self._prompts, input_ids, scores, strict=True)
            ]
        )


class StopRows(StoppingCriteria):
    """A stopping criterion that records when it stopped each row.

    Attributes:
        at: Number of new tokens at which each row was first stopped; None if it was not stopped.
    """

    def __init__(self, inner: StoppingCriteria, rows: int, width: int) -> None:
        self.at: list[int | None] = [None] * rows
        self._inner = inner
        self._width = width

    def __call__(self, input_ids: Int[Tensor, "batch pos"], scores: Any, **kwargs: Any) -> Any:
        """Which rows end here."""
        stop: Any = self._inner(input_ids, scores, **kwargs)  # pyright: ignore[reportArgumentType]
        new = input_ids.shape[1] - self._width
        self.at = [new if at is None and now else at for at, now in zip(self.at, stop.tolist(), strict=True)]
        return stop


class PatternStop(StoppingCriteria):
    """Stops rows whose new tokens end in a repeated pattern (see `repeats_pattern`)."""

    def __init__(self, width: int, **pattern: int) -> None:
        self._width, self._pattern = width, pattern

    def __call__(self, input_ids: Int[Tensor, "batch pos"], scores: Any, **kwargs: Any) -> Any:
        """Which rows end here."""
        new = input_ids[:, self._width :].tolist()
        return torch.tensor([repeats_pattern(row, **self._pattern) for row in new], device=input_ids.device)


def stock(processor: LogitsProcessor) -> RowProcessor:
    """A transformers processor for one row."""
    return lambda ids, scores, _: processor(ids[None].long(), scores[None])[0]  # pyright: ignore[reportArgumentType]


def presence(penalty: float) -> RowProcessor:
    """Subtract `penalty` from the logit of every token generated so far, regardless of count (OpenAI's API; vLLM)."""

    def process(ids: Tensor, scores: Tensor, prompt: int) -> Tensor:
        scores = scores.clone()
        scores[ids[prompt:].unique()] -= penalty
        return scores

    return process


def dry(multiplier: float, base: float, allowed: int, breakers: Sequence[int] = (), longest: int = 50) -> RowProcessor:
    """DRY ("don't repeat yourself"), as published for text-generation-webui.

    A token that would extend a repetition of n >= `allowed` tokens loses `multiplier * base ** (n - allowed)`, where n
    is the length of the longest suffix of the text that occurred earlier followed by that token. Prompt and answer both
    count. `breakers` are token ids that no match spans and that are never penalised; matches longer than `longest`
    count as `longest`.
    """
    stop = torch.tensor(list(breakers), dtype=torch.long)

    def process(ids: Tensor, scores: Tensor, _prompt: int) -> Tensor:
        n = len(ids)
        barrier = torch.isin(ids, stop.to(ids.device))
        if n < 2 or bool(barrier[-1]):
            return scores
        lengths = _suffix_matches(ids, barrier, longest)
        lengths[barrier[1:]] = 0  # what would follow is a breaker
        best = torch.zeros(scores.shape[-1], dtype=torch.long, device=scores.device)
        best.scatter_reduce_(0, ids[1:].to(scores.device), lengths.to(scores.device), "amax")
        penalty = multiplier * base ** (best - allowed).to(scores.dtype)
        return scores - torch.where(best >= max(allowed, 1), penalty, torch.zeros_like(penalty))

    return process


def _suffix_matches(ids: Int[Tensor, " pos"], barrier: Bool[Tensor, " pos"], longest: int) -> Int[Tensor, " end"]:
    """How many tokens up to each position, the last one left out, equal the end of the text."""
    alive = ids[:-1] == ids[-1]
    lengths = alive.long()
    for back in range(1, min(longest, len(ids) - 1)):
        if not bool(alive.any()) or bool(barrier[-1 - back]):
            break
        shifted = torch.zeros_like(alive)
        shifted[back:] = ids[: len(ids) - 1 - back] == ids[-1 - back]
        alive = alive & shifted
        lengths += alive
    return lengths


def dry_breakers(tokenizer: Any, breakers: Sequence[str] = BREAKERS) -> list[int]:
    """Ids of the strings that break DRY's matches: the last token of "a" followed by each string, as published."""
    return sorted({int(tokenizer(f"a{text}", add_special_tokens=False)["input_ids"][-1]) for text in breakers})


def sampled(temperature: float, seed: int, prompt: str) -> RowProcessor:
    """Sampling at a temperature, with random numbers that depend only on `seed` and the prompt's id.

    Gumbel noise is added to logits divided by the temperature, and the argmax of the sum is a sample from the softmax.
    Greedy decoding of the returned logits therefore samples, and no row's logits depend on another row.
    """
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{prompt}".encode()).digest()[:7]))

    def process(_ids: Tensor, scores: Tensor, _prompt: int) -> Tensor:
        exponential = torch.empty(scores.shape[-1], dtype=torch.float64).exponential_(generator=generator)
        return scores / temperature - exponential.log().to(scores)

    return process


def repeats_pattern(
    new: Sequence[int], *, shortest: int = 1, longest: int = 64, times: int = 4, tokens: int = 64
) -> bool:
    """Whether the text ends in at least `times` copies of a pattern (`shortest` to `longest`) and `tokens` tokens."""
    for period in range(shortest, longest + 1):
        span = max(times * period, tokens)
        if span > len(new):
            return False
        if new[-1] == new[-1 - period] and list(new[-span + period :]) == list(new[-span:-period]):
            return True
    return False
