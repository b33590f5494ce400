"""DRY ("don't repeat yourself", p-e-w 2024): a sampler that makes the next token of a repetition less likely.

For each earlier place where the last n tokens stand as well, the token that followed there loses
`multiplier * base ** (n - allowed_length)`, if n is at least `allowed_length`; the longest such n counts.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor
from transformers import LogitsProcessor

from sinkscope.files.arguments import checks_arguments
from sinkscope.files.records import Natural
from sinkscope.loops.text.repetition import copy_length

LONGEST_COPY = 64  # tokens of a repetition that count; the loss of more is beyond any logit
LARGEST_LOSS = 1e9  # beyond any logit, and within float32

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DRY(LogitsProcessor):
    """Make repetitions less likely: `model.generate(..., logits_processor=[DRY()])`.

    The prompt counts as well. It needs no session, and joins a guard or a policy in the same call.

    Args:
        multiplier: Loss of the logit that would prolong a repetition of `allowed_length` tokens.
        base: Factor of the loss for every further token; at least 1.
        allowed_length: Longest repetition, in tokens, that may be prolonged without a loss, plus one.
        ignore: Ids that are part of no repetition, such as the padding of a batch. Common settings have those of line
            breaks, colons, quotation marks and stars, which hides loops of several lines.

    Raises:
        SinkscopeError: A number is out of range.

    Example:
        >>> scores = DRY(multiplier=1.0)(torch.tensor([[5, 6, 7, 5, 6]]), torch.zeros(1, 9))
        >>> scores[0, 7].item()
        -1.0
    """

    @checks_arguments
    def __init__(
        self,
        multiplier: Positive = 0.8,
        base: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.75,
        allowed_length: Natural = 2,
        *,
        ignore: Collection[int] = (),
    ) -> None:
        self._multiplier = multiplier
        self._base = base
        self._allowed_length = allowed_length
        self._ignore = ignore

    def __call__(self, input_ids: Int[Tensor, "row pos"], scores: Float[Tensor, "row vocab"]) -> Any:
        """Return the scores with the losses."""
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            longest = 0
            while longest < min(LONGEST_COPY, len(ids)) and ids[-1 - longest] not in self._ignore:
                longest += 1
            losses: dict[int, float] = {}
            for place in range(1, len(ids)):
                if ids[place - 1] != ids[-1]:
                    continue
                length = copy_length(ids, place, longest)
                if length >= self._allowed_length:
                    loss = self._loss(length - self._allowed_length)
                    losses[ids[place]] = max(loss, losses.get(ids[place], 0.0))
            scores[row, list(losses)] -= torch.tensor(list(losses.values())).to(scores)
        return scores

    def _loss(self, further: int) -> float:
        """The loss of a token that prolongs a repetition, which has `further` tokens more than allowed."""
        if math.log(self._multiplier) + further * math.log(self._base) > math.log(LARGEST_LOSS):
            return LARGEST_LOSS
        return self._multiplier * self._base**further
