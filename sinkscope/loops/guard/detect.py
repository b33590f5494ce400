"""Detection of loops: one monitor for each row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.loops.text.monitor import Monitor, Settings, WatchedRow
from sinkscope.loops.text.outputs import split


@dataclass(eq=False)
class GuardedRows:
    """The rows that share a cache, since their last prompt.

    Attributes:
        rows: The rows.
        n_read: Number of tokens in the cache after the last call.
        ends: Ids that end a row, or pad one that has ended.
        stops: Ids that end a row.
        count: Number of generated tokens of each row, with those after its end.
    """

    rows: list[WatchedRow]
    n_read: int
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
