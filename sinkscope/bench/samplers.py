"""Sampling with random numbers of its own for each row, so that other rows of a batch have no influence.

The sampling of transformers draws one random number for all rows: a prompt's output would depend on the batch it is in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LogitsProcessor

from sinkscope.generation.decode import allow_only
from sinkscope.models.draws import draws, gumbel


class RowSampler(LogitsProcessor):
    """Sampling whose random numbers depend only on the seed and the prompt's id.

    Gumbel noise is added to logits divided by the temperature, and the argmax of the sum is a sample from the softmax.
    All other tokens are forbidden, so that `generate` with `do_sample` returns it, and edits can see that it samples.

    Args:
        temperature: Temperature, above 0.
        seed: Seed of the sampling.
        prompts: Ids of the rows' prompts.
    """

    def __init__(self, temperature: float, seed: int, prompts: Sequence[str]) -> None:
        self._temperature = temperature
        self._generators = [draws(seed, prompt) for prompt in prompts]

    def __call__(self, input_ids: Tensor, scores: Float[Tensor, "row vocab"]) -> Float[Tensor, "row vocab"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return scores that are minus infinity for all tokens but the one that was drawn."""
        noise = [gumbel(scores.shape[1], torch.float64, generator) for generator in self._generators]
        exact = scores.double() / self._temperature + torch.stack(noise).to(scores.device)
        return allow_only(scores, exact.argmax(-1))
