"""LoopGuard lowers the logits of tokens that would prolong a loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.loops.guard.words import Words
from sinkscope.loops.text.counters import NUMBER

LENIENT = 2
"""Number of tokens that may be repeated without a loss, such as a name."""
SURE = 4.0
"""Difference in logit to the token that takes the place of the likeliest one, from which on the model is sure: what it
would begin instead is often no word."""
BROKEN = 20.0
"""Loss of a token that would break a word."""


@dataclass(eq=False)
class Steering:
    """How a row that looped is kept from looping again: the longer a repetition, the less likely is its next token.

    A token that would prolong a copy of the last n tokens loses `penalty` for each of them but the first two, for every
    copy among the last W tokens since the act and for the longest one before; and more with every act in succession.
    This is DRY (p-e-w 2024), but it grows slowly and counts no tokens before the act: the loop is left where the model
    is least certain of it, and not where the alarm happened to come. Counting all copies ends sentences that come back
    with another word each time. An end of the text loses what the likeliest token lost, so that no text ends only
    because its next word is less likely. A row that has looped is steered to its end, because a real model falls back
    into its loop as soon as nothing is lost any more.

    Where words are known, only tokens that begin a word lose, unless the repetition has none, and nothing goes on with
    the word before instead. Where the model is sure of the word that it has to leave, it takes one that the row has.

    Attributes:
        penalty: What the logit of a token loses for each token of a copy.
        window: Number of last tokens of which every copy counts, and within which an act is soon after another (W).
        since: Number of tokens of the row at the first act, without those that were taken back.
        until: Last generated token at which an act is soon after the one before.
        level: Number of acts before the last one, each soon after the one before.
        words: Where words begin. None: not known.
        is_number: Says which tokens are numbers, after a loop whose numbers change: they count as equal.
        avoided: Tokens with which the word goes on that was likeliest before the steering.
        avoided_at: Place where it would have begun.
    """

    penalty: float
    window: int
    since: int
    until: int = -1
    level: int = 0
    words: Words | None = None
    is_number: Callable[[int], bool] | None = None
    avoided: frozenset[int] = frozenset()
    avoided_at: int = 0
    _ids: Sequence[int] = ()  # the row, in which only new places are looked at
    _places: dict[int, list[int]] = field(default_factory=dict)  # of each token among the first `_known` of them
    _known: int = 0

    def act(self, ids: Sequence[int], taken_back: int, now: int) -> int:
        """Steer a row from here on, and raise the level l (section 5.3) if the act before was recent.

        Args:
            ids: Ids of the row, with those that are taken back.
            taken_back: Number of the last ids that are taken back.
            now: Number of the generated token.

        Returns:
            The level.
        """
        self._ids = ()  # some may be taken back now
        self.level = self.level + 1 if now <= self.until else 0
        self.since = min(self.since, len(ids) - taken_back)
        self.until = now + self.window
        return self.level

    def losses(self, ids: Sequence[int]) -> dict[int, float]:
        """Return what the logits of tokens lose after a row of ids."""
        strength = self.penalty * (self.level + 1)
        every = max(self.since, len(ids) - self.window)
        before: dict[int, float] = {}
        losses: dict[int, float] = {}
        compared = ids
        if self.is_number is None:
            earlier = self._earlier(ids)
        else:
            compared = [NUMBER if self.is_number(token) else token for token in ids]
            earlier = [place for place, token in enumerate(compared[:-1]) if token == compared[-1]]
        for place, length in copies(compared, earlier, len(ids) - self.since):
            token, loss = ids[place], strength * (length - LENIENT)
            if loss <= 0 or self._within_word(ids, token, length):
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
        words = self.words
        if words is not None and ids[-1] in words.left_open and words.seam(ids, self.avoided_at + 1, len(ids)) is None:
            logits[list(self.avoided)] -= BROKEN  # another beginning gets no end of the word avoided
        losses = self.losses(ids)
        if not losses:
            return
        likeliest, plain = int(logits.argmax()), logits.clone()
        lost = losses.get(likeliest, 0.0)
        logits[list(losses)] -= torch.tensor(list(losses.values())).to(logits)
        logits[list(ends)] -= lost
        if words is None or not lost or words.goes_on(ids[-1], likeliest):
            return
        if ids[-1] in words.left_open:
            logits[list(words.inside)] -= BROKEN
        instead = int(logits.argmax())
        self.avoided, self.avoided_at = words.rest(ids, likeliest), len(ids)
        if plain[likeliest] - plain[instead] > SURE:  # only what the text has had as a word, which then is whole
            others = torch.ones_like(logits)
            others[[*words.whole(ids), *ends]] = 0
            logits -= BROKEN * others
            self.avoided = words.inside
        if int(logits.argmax()) == likeliest:
            self.avoided = frozenset()

    def _earlier(self, ids: Sequence[int]) -> Sequence[int]:
        """Places of the last id before the last place; of a row that only grows, the time does not depend on it."""
        if self._ids is not ids:
            self._ids, self._places, self._known = ids, {}, 0
        for place in range(self._known, len(ids) - 1):
            self._places.setdefault(ids[place], []).append(place)
        self._known = len(ids) - 1
        return self._places.get(ids[-1], ())

    def _within_word(self, ids: Sequence[int], token: int, length: int) -> bool:
        """Whether a token after the last ids goes on with a word of a copy of a length in which words begin."""
        words = self.words
        if words is None or not words.goes_on(ids[-1], token):
            return False
        return words.seam(ids, len(ids) - length, length) is not None


def gumbel(logits: Float[Tensor, " vocab"], generator: torch.Generator) -> Float[Tensor, " vocab"]:
    """Return noise with which the largest logit is a draw: of softmax(logits / t) if it is added t times."""
    return -torch.empty_like(logits, dtype=torch.float32).exponential_(generator=generator).log()


def copies(ids: Sequence[int], ends: Sequence[int], longest: int) -> Iterator[tuple[int, int]]:
    """Find where an earlier copy of the last ids is followed by a token, and the length of the copy, at most `longest`.

    Args:
        ids: The ids.
        ends: Where the last id occurred before.
        longest: Largest length, from which on a copy is not compared.
    """
    for end in ends:
        length = 0
        while length < min(end + 1, longest) and ids[end - length] == ids[-1 - length]:
            length += 1
        if length:
            yield end + 1, length
