"""Samplers, applied row by row so that padding and other rows have no influence.

The stock processors of transformers also see the left padding of a short row, and its sampling draws one random number
for all rows: in both cases a prompt's output depends on the batch it is in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

RowProcessor = Callable[[Tensor, Tensor], Tensor]
"""(ids `[pos]` without padding, scores `[vocab]`) -> scores `[vocab]`."""


class PerRow(LogitsProcessor):
    """Applies a separate processor to each row, without its padding.

    Args:
        processors: One processor per row.
        prompts: Number of prompt tokens per row, not counting padding.
    """

    def __init__(self, processors: Sequence[RowProcessor], prompts: Sequence[int]) -> None:
        self._processors = processors
        self._padding = [max(prompts) - length for length in prompts]

    def __call__(self, input_ids: Int[Tensor, "batch pos"], scores: Float[Tensor, "batch vocab"]) -> Any:
        """Scores of the next token."""
        processed: list[Tensor] = []
        for row, processor in enumerate(self._processors):
            processed.append(processor(input_ids[row, self._padding[row] :], scores[row]))
        return torch.stack(processed)


def samplers(
    name: str, temperature: float, seed: int, prompts: Sequence[str], lengths: Sequence[int]
) -> list[LogitsProcessor]:
    """What chooses the tokens of some prompts, as `generate` takes it.

    Args:
        name: Name of a method; those that are no samplers change nothing.
        temperature: Temperature of every method; 0 is greedy.
        seed: Seed of the sampling.
        prompts: Ids of the prompts.
        lengths: Tokens of each prompt.
    """
    chosen: list[list[RowProcessor]] = []
    if name == "repetition-penalty":
        chosen.append([stock(RepetitionPenaltyLogitsProcessor(1.1))] * len(prompts))
    if name == "no-repeat-4-gram":
        chosen.append([stock(NoRepeatNGramLogitsProcessor(4))] * len(prompts))
    if name == "sampling":
        chosen.append([sampled(1.0, seed, prompt) for prompt in prompts])
    if temperature:
        chosen.append([sampled(temperature, seed, prompt) for prompt in prompts])
    return [PerRow(processors, lengths) for processors in chosen]


def stock(processor: LogitsProcessor) -> RowProcessor:
    """A transformers processor for one row."""
    return lambda ids, scores: processor(ids[None].long(), scores[None])[0]  # pyright: ignore[reportArgumentType]


def sampled(temperature: float, seed: int, prompt: str) -> RowProcessor:
    """Sampling at a temperature, with random numbers that depend only on `seed` and the prompt's id.

    Gumbel noise is added to logits divided by the temperature, and the argmax of the sum is a sample from the softmax.
    Greedy decoding of the returned logits therefore samples, and no row's logits depend on another row.
    """
    digest = hashlib.sha256(f"{seed}/{prompt}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))

    def process(_ids: Tensor, scores: Tensor) -> Tensor:
        exponential = torch.empty(scores.shape[-1], dtype=torch.float64).exponential_(generator=generator)
        return scores / temperature - exponential.log().to(scores)

    return process
