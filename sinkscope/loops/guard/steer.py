"""From an alarm of LoopGuard on, tokens that would prolong a repetition become less likely.

Where the last tokens of a row stand earlier is looked up. The longer such a copy is, the more of its logit loses the
token that followed it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Whole, check_fields
from sinkscope.loops.text.repetition import EarlierCopies

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LENIENT = 2
"""Number of tokens that may be repeated without a loss under a guard, such as a name."""


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
    Unlike under DRY it grows slowly and counts no tokens before the act: the loop is left where the model is least
    certain of it, and not where the alarm happened to come. Counting all copies ends sentences that come back with
    another word each time. An end of the text loses what the likeliest token lost, so that no text ends only because
    its next word is less likely. A row that has looped is steered to its end, because a real model falls back into its
    loop as soon as nothing is lost any more.

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
