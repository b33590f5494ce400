"""What a block knows of the rows of a cache: it lies on the cache, and is copied, moved and cropped with it.

A cache that was filled outside of a block, or put together from others, has nothing of it, and edits that need earlier
values refuse it. `put_rows` gives a cache a class of its own (`_WithRows`, before the cache's class), whose methods
move what is known together with the rows. `copy.deepcopy` copies it like everything else on a cache. `forget_rows`
takes both away.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache as cached
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.engine.tokens import TokenPositions

ROWS = "sinkscope_rows"
"""The attribute of a cache that holds the states of its rows, by the number of the run."""


class MovesWithRows(Protocol):
    """Knowledge about the rows of a batch, which can be reordered with them."""

    def take(self, rows: Int[Tensor, " row"]) -> MovesWithRows | None:
        """Return what is known of other rows of the batch, by their numbers; None if that is nothing."""
        ...


@dataclass(eq=False)
class Memory:
    """What an edit remembers of the rows of a batch.

    Attributes:
        of_rows: A value of each row, by name; NaN if a row has none yet.
        of_tokens: A value of each token of each row so far, by name.
    """

    of_rows: dict[str, Tensor] = field(default_factory=dict)
    of_tokens: dict[str, Tensor] = field(default_factory=dict)

    def keep(
        self,
        name: str,
        values: Float[Tensor, "batch pos neuron"],
        at: Bool[Tensor, "batch pos"],
        documents: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch _ neuron"]:
        """Store the value where `at` holds (at most once in a document); other rows keep their former value.

        Gradients flow through what is returned, within the call; for later calls it is a constant.

        Args:
            name: Name of the value.
            values: Values of the tokens of the call.
            at: Where the value stands.
            documents: Document of each token, if several texts are packed into a row.

        Returns:
            The value of each row, or of each token's document.
        """
        before = self.of_rows.get(name, torch.nan)
        # No synchronisation with the device: rows without a hit are chosen by `where`, not by indexing.
        if documents is None:
            here = torch.where(at[..., None], values, 0).sum(1)
            value = torch.where(at.any(1, keepdim=True), here, before)[:, None]
        else:
            own = (documents[:, :, None] == documents[:, None]) & at[:, None]
            here = own.to(values.dtype) @ torch.where(at[..., None], values, 0)
            if isinstance(before, Tensor):
                before = before[:, None]
            value = torch.where(own.any(2, keepdim=True), here, before)
        self.of_rows[name] = value[:, -1].detach()
        return value

    def add(self, name: str, values: Float[Tensor, "batch new *d"], past: int) -> Float[Tensor, "batch seen *d"]:
        """Store a value of each new token, and return those of all tokens; the call began after `past` of them."""
        earlier = self.of_tokens.get(name)
        if earlier is not None:
            values = torch.cat([earlier[:, :past], values], 1)
        self.of_tokens[name] = values.detach()
        return values


@dataclass(eq=False)
class RowState:
    """What a block knows of the rows that share a cache.

    Attributes:
        tokens: The tokens read so far.
        partial: Whether the first tokens were read before the block was entered.
        memory: What each edit remembers, by the edit's key.
        prefilling: Whether the last call read a prompt or part of one.
        prompt: Number of real tokens in each row at the end of the last prefill; empty before it.
        decoded: Number of single-token calls since then.
        of_actors: What each policy, guard or counter knows of the rows, by its key.
    """

    tokens: TokenPositions
    partial: bool = False
    memory: dict[Hashable, Memory] = field(default_factory=dict)
    prefilling: bool = False
    prompt: tuple[int, ...] = ()
    decoded: int = 0
    of_actors: dict[Hashable, MovesWithRows] = field(default_factory=dict)

    def copy(self) -> RowState:
        """Return what edits know of the rows, as it is now."""
        memory = {key: Memory(dict(notes.of_rows), dict(notes.of_tokens)) for key, notes in self.memory.items()}
        return RowState(self.tokens, self.partial, memory)

    def take(self, rows: Int[Tensor, " row"]) -> None:
        """Take rows of the batch, by their numbers, in place of the present ones."""
        self.tokens = self.tokens.of_rows(rows)
        for memory in self.memory.values():
            for values in (memory.of_rows, memory.of_tokens):
                for name, value in values.items():
                    values[name] = value[rows.to(value.device)]
        if self.prompt:
            numbers = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows  # they may be given by a mask
            self.prompt = tuple(self.prompt[row] for row in numbers.tolist())
        for key, known in list(self.of_actors.items()):
            moved = known.take(rows)
            if moved is None:
                del self.of_actors[key]
            else:
                self.of_actors[key] = moved


def put_rows(cache: Any, run: int, state: RowState) -> None:
    """Lay what a run knows of some rows on their cache."""
    states: dict[int, RowState] | None = getattr(cache, ROWS, None)
    if states is None:
        with suppress(TypeError, AttributeError):  # a class that allows no further attributes: nothing is known of it
            setattr(cache, ROWS, {run: state})
            cache.__class__ = _with_rows(type(cache))
    else:
        states[run] = state


def forget_rows(cache: Any, run: int) -> None:
    """Take what a run knows of its rows from a cache, which is again what it was when nobody knows anything."""
    states: dict[int, RowState] = getattr(cache, ROWS, {})
    states.pop(run, None)
    if not states and isinstance(cache, _WithRows):
        delattr(cache, ROWS)
        cache.__class__ = type(cache).__mro__[2]


class _WithRows:
    """Moves what is known of the rows of a cache whenever the cache moves them."""

    def reorder_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Reorder the rows as beam search requests."""
        result = super().reorder_cache(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        _take(self, (*args, *kwargs.values())[0])
        return result

    def batch_select_indices(self, *args: Any, **kwargs: Any) -> Any:
        """Keep only some rows."""
        result = super().batch_select_indices(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        _take(self, (*args, *kwargs.values())[0])
        return result

    def batch_repeat_interleave(self, *args: Any, **kwargs: Any) -> Any:
        """Repeat each row."""
        result = super().batch_repeat_interleave(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        times = int((*args, *kwargs.values())[0])
        for state in vars(self)[ROWS].values():
            state.take(torch.arange(len(state.tokens.pos)).repeat_interleave(times))
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save the cache as one of the class that it had, without what is known of its rows."""
        kind = type(self).__mro__[2]
        attributes = {name: value for name, value in vars(self).items() if name != ROWS}
        return _restored, (kind, attributes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the cache with what is known of its rows."""
        from copy import deepcopy

        new = object.__new__(type(self))
        memo[id(self)] = new
        vars(new).update(deepcopy(vars(self), memo))
        return new


def _restored(kind: type, attributes: dict[str, Any]) -> Any:
    """A cache of a class, with these attributes."""
    new = object.__new__(kind)
    vars(new).update(attributes)
    return new


@cached
def _with_rows(kind: type) -> type:
    """A class of caches that carry what is known of their rows; it has the name of the class behind it."""
    return type(kind.__name__, (_WithRows, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _take(cache: Any, rows: Tensor) -> None:
    for state in vars(cache)[ROWS].values():
        state.take(rows)
