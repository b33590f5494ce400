"""Tokens that would prolong a repetition become less likely: from an alarm on under LoopGuard, and always under DRY.

Both look up where the last tokens of a row stand earlier. The longer such a copy is, the more of its logit loses the
token that followed it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor
from transformers import LogitsProcessor

from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.records import Natural, Whole, check_fields
from sinkscope.loops.text.repetition import EarlierCopies

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Growth = Annotated[float, Field(ge=1, allow_inf_nan=False)]
LENIENT = 2
"""Number of tokens that may be repeated without a loss under a guard, such as a name."""
LONGEST_COPY = 64  # tokens of a copy that count under DRY; the loss of more is beyond any logit
LARGEST_LOSS = 1e9  # beyond any logit, and within float32


def lower(logits: Float[Tensor, " vocab"], losses: Mapping[int, float]) -> None:
    """Take their losses from the logits of tokens, in place."""
    logits[list(losses)] -= torch.tensor(list(losses.values())).to(logits)


@dataclass(frozen=True, kw_only=True)
class Steer:
    """How LoopGuard keeps a row that looped from looping again; not in the paper.

    Attributes:
        penalty: What the logit of a token loses for each token of a repetition that it would prolong, and for each
            copy of it among the last W, after an alarm; as much again for each alarm before it in succession
            (`Steering`). 0 lowers none.
        temperature: After an alarm, the row's tokens are drawn at this temperature where `generate` would take the
            likeliest one, because greedy decoding leads back into a loop. 0 takes the likeliest.
        seed: Seed of these draws, which depend on the row's own tokens alone.
    """

    penalty: NotNegative = 2.0
    temperature: NotNegative = 0.7
    seed: Whole = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not (self.penalty or self.temperature):
            raise SinkscopeError("Steer(penalty=0, temperature=0) does nothing: give LoopGuard(steer=None)")


@dataclass(eq=False)
class Steering:
    """How a row that looped is kept from looping again: the longer a repetition, the less likely is its next token.

    A token that would prolong a copy of the last n tokens loses `penalty` for each of them but the first two, for every
    copy among the last W tokens since the act and for the longest one before; and more with every act in succession.
    Unlike DRY this grows slowly and counts no tokens before the act: the loop is left where the model is least certain
    of it, and not where the alarm happened to come. Counting all copies ends sentences that come back with another word
    each time. An end of the text loses what the likeliest token lost, so that no text ends only because its next word
    is less likely. A row that has looped is steered to its end, because a real model falls back into its loop as soon
    as nothing is lost any more.

    Attributes:
        penalty: What the logit of a token loses for each token of a copy.
        window: Number of last tokens whose copies all count, and within which an act is soon after another (W).
        since: Number of tokens of the row at the first act, without those that were taken back.
        until: Last generated token at which an act is soon after the one before.
        level: Number of acts before the last one, each soon after the one before.
        copies: Finds the copies; numbers count as equal after a loop whose numbers change.
    """

    penalty: float
    window: int
    since: int
    until: int = -1
    level: int = 0
    copies: EarlierCopies = field(default_factory=partial(EarlierCopies, LENIENT + 1), repr=False)

    def act(self, ids: Sequence[int], taken_back: int, now: int) -> int:
        """Steer a row from here on, and raise the level l (section 5.3) if the act before was recent.

        Args:
            ids: Ids of the row, with those that are taken back.
            taken_back: Number of the last ids that are taken back.
            now: Number of the generated token.

        Returns:
            The level.
        """
        self.level = self.level + 1 if now <= self.until else 0
        self.since = min(self.since, len(ids) - taken_back)
        self.until = now + self.window
        return self.level

    def losses(self, ids: Sequence[int]) -> dict[int, float]:
        """Return what the logits of tokens lose after a row of ids, the row of the last call with more tokens."""
        strength = self.penalty * (self.level + 1)
        every = max(self.since, len(ids) - self.window)
        self.copies.follow(ids)
        before: dict[int, float] = {}
        losses: dict[int, float] = {}
        for place, length in self.copies.of_end(len(ids) - self.since):
            token, loss = ids[place], strength * (length - LENIENT)
            if loss <= 0:
                continue
            if place >= every:
                losses[token] = losses.get(token, 0.0) + loss
            else:
                before[token] = max(loss, before.get(token, 0.0))
        for token, loss in before.items():
            losses[token] = losses.get(token, 0.0) + loss
        return losses

    def steer(self, logits: Float[Tensor, " vocab"], ids: Sequence[int], ends: Collection[int]) -> None:
        """Lower the logits after a row of ids in place; `ends` are the ids that end it."""
        losses = self.losses(ids) if self.penalty else {}
        if losses:
            lost = losses.get(int(logits.argmax()), 0.0)
            lower(logits, losses)
            logits[list(ends)] -= lost


class DRY(LogitsProcessor):
    """Make repetitions less likely ("don't repeat yourself", p-e-w 2024): `logits_processor=[DRY()]` of `generate`.

    For each earlier place where the last n tokens stand as well, the token that followed there loses
    `multiplier * base ** (n - allowed_length)`, if n is at least `allowed_length`; the longest such n counts. The
    prompt counts as well. It needs no session, and joins a guard or a policy in the same call.

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
        base: Growth = 1.75,
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
        for ids, row_scores in zip(input_ids.tolist(), scores, strict=True):
            copies = EarlierCopies(1)
            copies.follow([-place if token in self._ignore else token for place, token in enumerate(ids, 1)])
            losses: dict[int, float] = {}
            for place, length in copies.of_end(LONGEST_COPY):
                further = length - self._allowed_length
                if further >= 0:
                    grown = math.log(self._multiplier) + further * math.log(self._base)
                    loss = math.exp(min(grown, math.log(LARGEST_LOSS)))
                    losses[ids[place]] = max(loss, losses.get(ids[place], 0.0))
            lower(row_scores, losses)
        return scores
