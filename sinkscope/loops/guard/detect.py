"""Detection of loops: one monitor for each row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.loops.guard.steer import Steering
from sinkscope.loops.text.monitor import Monitor, Settings
from sinkscope.loops.text.outputs import split

MARKED_EVERY, MARKS = 1024, 4
"""The monitor of a row that looped is copied every 1024 tokens, and the last 4 copies stay: less is read again."""


class WatchedRow:
    """One row and its monitor, since its last prompt.

    Args:
        monitor: Makes its monitor.
        prompt: Number of real tokens before its first generated token.
        prompt_ids: The ids of the latest of them that are known.

    Attributes:
        monitor: Its monitor.
        ids: Its latest ids, up to the newest that the monitor has seen.
        steering: How a guard steers it since it looped.
        stops: Whether a guard lets it end.
    """

    def __init__(self, monitor: Callable[[], Monitor], prompt: int = 0, prompt_ids: Sequence[int] = ()) -> None:
        self.monitor = monitor()
        self._marks = [monitor()]
        self.prompt = prompt
        self.ids = list(prompt_ids)
        self._prompt_ids = len(self.ids)
        self.steering: Steering | None = None
        self.stops = False

    @property
    def written(self) -> int:
        """Number of its generated tokens that the monitor has seen."""
        return len(self.ids) - self._prompt_ids

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return self.prompt + self.written

    def add(self, token: int, p_max: float | None) -> bool:
        """Pass the next token, and the largest probability of the one after it, to the monitor; whether it triggers."""
        self.ids.append(token)
        return self._read(token, p_max)

    def take_back(self, count: int) -> None:
        """Forget the last `count` tokens, as if they had never arrived: an earlier monitor reads those after it."""
        del self.ids[len(self.ids) - count :]
        if self.steering is not None:
            self.steering.copies.take_back(len(self.ids))
        while self._marks[-1].last.step > self.written:
            self._marks.pop()
        looped = self.monitor.rule.looped
        self.monitor = deepcopy(self._marks[-1])
        self.monitor.rule.looped = looped  # first, because what copies are is asked once, when they first count
        for token in self.ids[self._prompt_ids + self.monitor.last.step :]:
            self._read(token, 0.0)

    def _read(self, token: int, p_max: float | None) -> bool:
        """Pass a token to the monitor, and mark it now and then if the row looped; whether it triggers."""
        decision = self.monitor.update(token, p_max)
        is_late = self.written < decision.step + MARKS * MARKED_EVERY
        if self.steering is not None and is_late and decision.step % MARKED_EVERY == 0:
            self._marks.append(deepcopy(self.monitor))
            del self._marks[1:-MARKS]
        return decision.trigger


@dataclass(eq=False)
class GuardedRows:
    """The rows that share a cache, since their last prompt.

    Attributes:
        rows: The rows.
        seen: Number of tokens in the cache after the last call.
        ends: Ids that end a row, or pad one that has ended.
        stops: Ids that end a row.
        count: Number of generated tokens of each row, with those after its end.
    """

    rows: list[WatchedRow]
    seen: int
    ends: Collection[int]
    stops: Sequence[int] = ()
    count: int = 0

    def take(self, rows: Int[Tensor, " row"]) -> None:
        """Return None: rows that changed places are watched anew."""


def ids_of_setting(settings: Any, name: str) -> list[int]:
    """Return the token ids that a setting of the generation gives: none, one or several."""
    value = getattr(settings, name, None)
    if value is None:
        return []
    return torch.as_tensor(value).reshape(-1).tolist()


def monitors(settings: Settings, tokenizer: Any = None) -> Callable[..., Monitor]:
    """Return a function that makes monitors, which tell data from prose and find counters if there is a tokenizer."""
    if tokenizer is None:
        return partial(Monitor, settings)

    @cache
    def words_of_token(token: int) -> Sequence[str]:
        return split(tokenizer.decode([token]))

    def words_of(ids: Sequence[int]) -> Sequence[str]:
        if len(ids) == 1:
            return words_of_token(ids[0])
        return split(tokenizer.decode(ids))

    return partial(Monitor, settings, words_of)


def largest_probability(logits: Float[Tensor, "row vocab"]) -> Float[Tensor, " row"]:
    """Return the largest probability of any token, max_v Pr(v), in float32."""
    logits = logits.detach().float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()
