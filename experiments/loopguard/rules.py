"""Answers to a loop that were compared with LoopGuard's own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.loops.guard import LoopGuard
from sinkscope.loops.guard.steer import Steering, copies
from sinkscope.loops.text.signals import tail_period

PENALTY, LENGTH = 5.0, 5  # of the ladder: a logit at each rung, and n-grams a token shorter at each
DRAW_FROM, DRAWS, LIKELY = 6, 64, 0.1


class Ladder(Steering):
    """The earlier answer: the first alarm cuts, the next ones ban the loop's n-grams, and from the sixth on it draws.

    What was taken back is banned at once. It is meant for greedy decoding, which it replaces by drawing.
    """

    def __init__(self, penalty: float) -> None:
        super().__init__(penalty)
        self.rung = 0
        self.draws = 0
        self.following: dict[tuple[int, ...], set[int]] = {}
        self.random = torch.Generator().manual_seed(0)

    def act(self, ids: Sequence[int], taken_back: int, now: int, window: int) -> int:
        """Climb a rung, and ban the n-grams of the loop."""
        if now > self.until:
            self.following = {}
        level = super().act(ids, taken_back, now, window)
        self.rung = level + (taken_back > 0)
        tail = tail_period(ids, repeats=2)
        if not self.rung or tail is None:
            return level
        length = max(2, LENGTH - self.rung)
        for end in range(tail.start + length - 1, len(ids)):
            before = tuple(ids[end - length + 1 : end])
            self.following.setdefault(before, set()).add(ids[end])
        if self.rung >= DRAW_FROM:
            self.draws = DRAWS
        return level

    def steer(self, logits: Float[Tensor, " vocab"], ids: Sequence[int], ends: Collection[int]) -> None:
        """Lower what completes a banned n-gram, or raise a drawn token."""
        latest = tuple(ids[2 - LENGTH :])
        banned: set[int] = set()
        for begin in range(len(latest)):
            banned.update(self.following.get(latest[begin:], ()))
        logits[list(banned)] -= PENALTY * self.rung
        if self.draws:
            self.draws -= 1
            probabilities = logits.softmax(-1)
            likely = torch.where(probabilities >= LIKELY * probabilities.max(), probabilities, 0)
            logits[torch.multinomial(likely, 1, generator=self.random)] = logits.max() + 100


class Longest(Steering):
    """The longest copy alone counts, from its first token on."""

    def loss(self, length: int) -> float:
        """What a token loses that would prolong a copy of a length."""
        return self.penalty * (self.level + 1) * length

    def losses(self, ids: Sequence[int]) -> dict[int, float]:
        """What the logits of tokens lose after a row of ids."""
        losses: dict[int, float] = {}
        for place, length in copies(ids, len(ids) - self.since):
            losses[ids[place]] = max(self.loss(length), losses.get(ids[place], 0.0))
        return losses


class Ends(Longest):
    """The same, but ends of the text lose nothing, and so gain from what the others lose."""

    def steer(self, logits: Float[Tensor, " vocab"], ids: Sequence[int], ends: Collection[int]) -> None:
        """Lower the logits after a row of ids in place."""
        super().steer(logits, ids, ())


class Dry(Ends):
    """DRY as others have it: a copy counts from where it began, and its cost grows by 1.75 with each token."""

    def act(self, ids: Sequence[int], taken_back: int, now: int, window: int) -> int:
        """Count from the first token of the row."""
        level = super().act(ids, taken_back, now, window)
        self.since = 0
        return level

    def loss(self, length: int) -> float:
        """0.8 for two tokens."""
        if length < 2:
            return 0.0
        return 0.8 * 1.75 ** (min(length, 40) - 2)


def guard(steering: type[Steering], **settings: Any) -> LoopGuard:
    """LoopGuard with another answer."""

    class Guard(LoopGuard):
        STEERING: ClassVar[type[Steering]] = steering

    return Guard(**settings)
