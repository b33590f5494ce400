"""DRY ("don't repeat yourself", p-e-w 2024): a sampler that makes the next token of a repetition less likely.

For each earlier place where the last n tokens stand as well, the token that followed there loses
`multiplier * base ** (n - allowed_length)`, if n is at least `allowed_length`; the longest such n counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor
from transformers import LogitsProcessor

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Natural
from sinkscope.results.options import checks_arguments

LONGEST_COPY = 64  # tokens of a repetition that count; the loss of more is beyond any logit

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DRY(LogitsProcessor):
    """Make repetitions less likely: `model.generate(..., logits_processor=[DRY()])`.

    The prompt counts as well. It needs no session, and joins a guard or a policy in the same call.

    Args:
        multiplier: Loss of the logit that would prolong a repetition of `allowed_length` tokens.
        base: Factor of the loss for every further token; at least 1.
        allowed_length: Longest repetition, in tokens, that may be prolonged without a loss, plus one.
        breakers: Texts that end a repetition: a token that contains one is part of none. Common settings have line
            breaks, colons, quotation marks and stars, which hides loops of several lines. By default there are none.
        tokenizer: Needed with breakers.
        ignore: Ids that are part of no repetition, such as the padding of a batch.

    Raises:
        SinkscopeError: A number is out of range, or there are breakers and no tokenizer.

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
        breakers: Sequence[str] = (),
        tokenizer: Any = None,
        ignore: Sequence[int] = (),
    ) -> None:
        if breakers and tokenizer is None:
            raise SinkscopeError(f"breakers={list(breakers)} need a tokenizer: pass tokenizer=model.tokenizer")
        self._multiplier = multiplier
        self._base = base
        self._allowed_length = allowed_length
        broken = set(ignore)
        if breakers:
            for token in range(len(tokenizer)):
                text = tokenizer.decode([token])
                if any(breaker in text for breaker in breakers):
                    broken.add(token)
        self._broken = np.array(sorted(broken), dtype=np.int64)

    def __call__(self, input_ids: Int[Tensor, "row pos"], scores: Float[Tensor, "row vocab"]) -> Any:
        """Return the scores with the losses."""
        rows: list[int] = []
        tokens: list[int] = []
        losses: list[float] = []
        for row, ids in enumerate(input_ids.cpu().numpy()):
            lengths = self._copied_lengths(ids)
            longest: dict[int, int] = {}
            for place in np.flatnonzero(lengths >= self._allowed_length):
                token = int(ids[place + 1])
                longest[token] = max(int(lengths[place]), longest.get(token, 0))
            for token, length in longest.items():
                rows.append(row)
                tokens.append(token)
                losses.append(self._multiplier * self._base ** (length - self._allowed_length))
        if not rows:
            return scores
        scores = scores.clone()
        scores[torch.tensor(rows), torch.tensor(tokens)] -= torch.tensor(losses).to(scores)
        return scores

    def _copied_lengths(self, ids: Int[np.ndarray, " pos"]) -> Int[np.ndarray, " earlier"]:
        """Return, for each position but the last, how many tokens up to it equal the last tokens of the row."""
        count = len(ids) - 1
        lengths = np.zeros(count, dtype=np.int64)
        equal = np.ones(count, dtype=bool)
        for back in range(min(LONGEST_COPY, count)):
            if ids[-1 - back] in self._broken:
                break
            equal[:back] = False
            equal[back:] &= ids[: count - back] == ids[-1 - back]
            if not equal.any():
                break
            lengths += equal
        return lengths
