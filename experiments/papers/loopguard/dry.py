"""The sampler DRY, beside which LoopGuard is measured: from the first token on, copies become less likely.

The public implementations (text-generation-webui, llama.cpp, ExLlamaV2 and others) agree: a sequence breaker ends the
copy that is looked for, and no breaker is made less likely.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor

from sinkscope.loops.guard.steer import lower
from sinkscope.loops.text.repetition import EarlierCopies

LONGEST_COPY = 64  # tokens of a copy that count; the loss of more is beyond any logit
LARGEST_LOSS = 1e9  # beyond any logit, and within float32


class DRY(LogitsProcessor):
    """Make repetitions less likely ("don't repeat yourself", p-e-w 2024): `logits_processor=[DRY()]` of `generate`.

    For each earlier place where the last n tokens stand as well, the token that followed there loses
    `multiplier * base ** (n - allowed_length)`, if n is at least `allowed_length`; the longest such n counts. The
    prompt counts as well. It joins a guard or a policy in the same call.

    Args:
        multiplier: Loss of the logit that would prolong a repetition of `allowed_length` tokens.
        base: Factor of the loss for every further token; at least 1.
        allowed_length: Longest repetition, in tokens, that may be prolonged without a loss, plus one.
        ignore: Ids that are part of no repetition and lose nothing, such as the padding of a batch ("sequence
            breakers"). Common settings have those of line breaks, colons, quotation marks and stars, which hides loops
            of several lines.

    Example:
        >>> scores = DRY(multiplier=1.0)(torch.tensor([[5, 6, 7, 5, 6]]), torch.zeros(1, 9))
        >>> scores[0, 7].item()
        -1.0
    """

    def __init__(
        self,
        multiplier: float = 0.8,
        base: float = 1.75,
        allowed_length: int = 2,
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
        for ids, row_scores in zip(input_ids.tolist(), scores, strict=True):
            copies = EarlierCopies(1)
            copies.follow([-place if token in self._ignore else token for place, token in enumerate(ids, 1)])
            losses: dict[int, float] = {}
            for place, length in copies.of_end(LONGEST_COPY):
                further = length - self._allowed_length
                if further >= 0 and ids[place] not in self._ignore:
                    grown = math.log(self._multiplier) + further * math.log(self._base)
                    loss = math.exp(min(grown, math.log(LARGEST_LOSS)))
                    losses[ids[place]] = max(loss, losses.get(ids[place], 0.0))
            lower(row_scores, losses)
        return scores
