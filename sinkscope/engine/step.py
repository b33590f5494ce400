"""The record of a forward call, and what is known of the rows of its cache.

A call may be a whole prompt, a chunk of one, one generated token, a later turn, or (without a cache) the whole prefix
again; rows may be padded on either side. `begin_call` makes the record at the beginning of the call:

1. The cache says how many tokens it holds, and what this run knows of its rows.
2. The mask says which of the other tokens are real.
3. Each real token gets its position: the number of real tokens before it in its row.

What is known of the rows lies on their cache, and is copied, moved and cropped with it. A cache that was filled outside
of a run, or put together from others, has none, and edits that need earlier values refuse it. `put_rows` gives a cache
a class of its own (`_WithRows`, before the cache's class), whose methods move what is known together with the rows.
`copy.deepcopy` copies it like everything else on a cache. `forget_rows` takes both away.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache as cached
from functools import cached_property
from typing import Any, Protocol

import torch
from einops import reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.engine.attention import shown
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.call_cache import cache_in, tokens_in

_ROWS = "sinkscope_rows"
"""The attribute of a cache that holds the states of its rows, by the number of the run."""


class MovesWithRows(Protocol):
    """Knowledge about the rows of a batch, which can be reordered with them."""

    def take(self, rows: Int[Tensor, " row"]) -> None:
        """Take rows of the batch, by their numbers, in place of the present ones."""
        ...


@dataclass(frozen=True, eq=False)
class TokenPositions:
    """True positions of the tokens of a batch: their numbers among the real tokens of each row.

    Attributes:
        pos: True position of every token; -1 at padding.
        length: Number of real tokens in each row.
        seen: Number of all tokens.
    """

    pos: Int[Tensor, "batch seen"]
    length: Int[Tensor, " batch"]
    seen: int

    @classmethod
    def none(cls, batch: int, device: torch.device) -> TokenPositions:
        """Return the positions of rows without tokens."""
        nothing = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        return cls(nothing, torch.zeros(batch, dtype=torch.int64, device=device), 0)

    @classmethod
    def of(cls, pos: Int[Tensor, "batch seen"]) -> TokenPositions:
        """Return tokens with these positions."""
        return cls(pos, (pos >= 0).sum(1), pos.shape[1])

    @cached_property
    def padded(self) -> int:
        """Number of the first tokens among which all padding is; whoever asks first waits for the device."""
        columns = (self.pos < 0).any(0).nonzero()
        return int(columns[-1]) + 1 if len(columns) else 0

    def read(self, real: Bool[Tensor, "batch new"]) -> TokenPositions:
        """Return these tokens and new ones; `real` says which of the new ones are no padding."""
        count = real.cumsum(1)
        later = torch.where(real, self.length[:, None] + count - 1, -1)
        length = self.length + count[:, -1] if real.shape[1] else self.length
        return TokenPositions(torch.cat([self.pos, later], 1), length, self.seen + real.shape[1])

    def first(self, count: int) -> TokenPositions:
        """Return the first tokens alone."""
        if count >= self.seen:
            return self
        return TokenPositions.of(self.pos[:, :count])

    def of_rows(self, rows: Int[Tensor, " row"]) -> TokenPositions:
        """Return the tokens of other rows of the batch, by their numbers."""
        rows = rows.to(self.pos.device)
        return TokenPositions(self.pos[rows], self.length[rows], self.seen)


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
        self, name: str, values: Float[Tensor, "batch pos neuron"], at: Bool[Tensor, "batch pos"]
    ) -> Float[Tensor, "batch neuron"]:
        """Store the value where `at` holds (at most once per row); other rows keep their former value.

        Gradients flow through what is returned, within the call; for later calls it is a constant.
        """
        # No synchronisation with the device: rows without a hit are chosen by `where`, not by indexing.
        here = torch.where(at[..., None], values, 0).sum(1)
        value = torch.where(at.any(1, keepdim=True), here, self.of_rows.get(name, torch.nan))
        self.of_rows[name] = value.detach()
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
    """What a run knows of the rows that share a cache.

    Attributes:
        tokens: The tokens read so far.
        partial: Whether the first tokens were read before the run was entered.
        memory: What each edit remembers, by the edit's key.
        of_cache: What the run's policies and guards know of the rows.
    """

    tokens: TokenPositions
    partial: bool = False
    memory: dict[Hashable, Memory] = field(default_factory=dict)
    of_cache: MovesWithRows | None = None

    def copy(self) -> RowState:
        """Return what edits know of the rows, as it is now."""
        memory = {key: Memory(dict(kept.of_rows), dict(kept.of_tokens)) for key, kept in self.memory.items()}
        return RowState(self.tokens, self.partial, memory)

    def take(self, rows: Int[Tensor, " row"]) -> None:
        """Take rows of the batch, by their numbers, in place of the present ones."""
        self.tokens = self.tokens.of_rows(rows)
        for memory in self.memory.values():
            for values in (memory.of_rows, memory.of_tokens):
                for name, value in values.items():
                    values[name] = value[rows.to(value.device)]
        if self.of_cache is not None:
            self.of_cache.take(rows)


def rows_on(cache: Any, run: int) -> RowState | None:
    """Return what a run knows of the rows of a cache; None if it has not seen them."""
    states: dict[int, RowState] | None = getattr(cache, _ROWS, None)
    return None if states is None else states.get(run)


def put_rows(cache: Any, run: int, state: RowState) -> None:
    """Lay what a run knows of some rows on their cache."""
    states: dict[int, RowState] | None = getattr(cache, _ROWS, None)
    if states is None:
        with suppress(TypeError, AttributeError):  # a class that allows no further attributes: nothing is known of it
            setattr(cache, _ROWS, {run: state})
            cache.__class__ = _with_rows(type(cache))
    else:
        states[run] = state


def forget_rows(cache: Any, run: int) -> None:
    """Take what a run knows of its rows from a cache, which is again what it was when nobody knows anything."""
    states: dict[int, RowState] = getattr(cache, _ROWS, {})
    states.pop(run, None)
    if not states and isinstance(cache, _WithRows):
        delattr(cache, _ROWS)
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
        for state in vars(self)[_ROWS].values():
            state.take(torch.arange(len(state.tokens.pos)).repeat_interleave(times))
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save the cache as one of the class that it had, without what is known of its rows."""
        kind = type(self).__mro__[2]
        kept = {name: value for name, value in vars(self).items() if name != _ROWS}
        return _restored, (kind, kept)

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
    for state in vars(cache)[_ROWS].values():
        state.take(rows)


@dataclass(eq=False)
class Call:
    """One forward call of the model.

    Attributes:
        step: Number of the call within the run, from 0.
        rows: Number of rows.
        past: Number of tokens (with padding) in the cache before the call.
        new: Number of tokens of a row that the call reads.
        ids: Ids of these tokens, if they are given as ids.
        cache: The cache that the call continues; None if it was given none.
        earlier: The tokens before the call.
        tokens: All tokens so far.
        state: What is known about these rows from earlier calls.
    """

    step: int
    rows: int
    past: int
    new: int
    ids: Int[Tensor, "batch pos"] | None
    cache: Any
    earlier: TokenPositions
    tokens: TokenPositions
    state: RowState
    _by_device: dict[torch.device, Int[Tensor, "batch pos"]] = field(default_factory=dict)

    @cached_property
    def index(self) -> Int[Tensor, "batch pos"]:
        """True position of each new token among the real tokens of its row; -1 at padding."""
        return self.tokens.pos[:, self.past :]

    @property
    def columns(self) -> Int[Tensor, "batch seen"]:
        """The same for every token so far, the new ones last."""
        return self.tokens.pos

    @property
    def before(self) -> Int[Tensor, " batch"]:
        """Number of real tokens in each row before the call."""
        return self.earlier.length

    def on(self, device: torch.device) -> Int[Tensor, "batch pos"]:
        """Return `index` on the device of a layer; a model may be spread over several."""
        if self.index.device == device:
            return self.index
        if device not in self._by_device:
            self._by_device[device] = self.index.to(device)
        return self._by_device[device]

    def check_read(self, what: str, remedy: str, enough: int = 0) -> None:
        """Refuse a call that continues tokens which an edit had to see and did not.

        Args:
            what: What is not known, as the end of "so ... is not known".
            remedy: What to do instead of entering the run first.
            enough: Number of first tokens that need not be seen.

        Raises:
            SinkscopeError: Such tokens were read before the run was entered, or into a cache that was put together
                from others.
        """
        if self.state.partial and self.past > enough:
            raise SinkscopeError(
                f"the first {self.past} tokens were read before this run was entered, so {what} is not known: enter "
                f"the run first, or {remedy}"
            )


def begin_call(run: int, step: int, given: Mapping[str, Any]) -> Call:
    """Make the record of a forward call.

    Args:
        run: Number of the run that acts in the call.
        step: Number of the call within the run.
        given: Arguments of the call by name. The mask may be 2-D (1 = real), 4-D (bool or additive), a dict of these
            by layer type, or None. Tokens that were read in an earlier call keep the mask of that call.
    """
    ids: Tensor | None = given.get("input_ids")
    tokens: Tensor = given["inputs_embeds"] if ids is None else ids
    cache, mask = cache_in(given), given.get("attention_mask")
    batch, new = tokens.shape[:2]
    past = 0 if cache is None else tokens_in(cache)
    state = rows_on(cache, run) if past else None
    if state is None or len(state.tokens.pos) != batch:
        state = RowState(TokenPositions.none(batch, tokens.device), partial=past > 0)
    earlier = state.tokens.first(past)  # tokens may have been taken back
    # Some may have been read in calls that this run did not act on; they come first.
    if isinstance(mask, dict):  # per layer type, as generation builds it for caches of fixed size
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    missing = past + new - earlier.seen
    if mask is None:
        real = torch.ones(batch, missing, dtype=torch.bool, device=tokens.device)
    else:
        real = _real(mask, batch, earlier.seen, past, new).to(tokens.device)
    everything = earlier.read(real)
    state.tokens = everything
    before = earlier if earlier.seen == past else everything.first(past)
    return Call(step, batch, past, new, ids, cache, before, everything, state)


def _real(mask: Any, batch: int, read: int, past: int, new: int) -> Bool[Tensor, "batch more"]:
    """Which tokens from index `read` on are real; earlier ones are not checked again."""
    total = past + new
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= total:
        return mask[:, read:total].bool()
    if isinstance(mask, Tensor) and mask.ndim == 4:
        # A real token is seen by itself; padding is seen by nobody. A window hides old tokens: those are history.
        start = min(past, mask.shape[-1] - new)
        part = shown(mask[..., start : start + new])
        seen = reduce(part, "batch head query key -> batch key", "any").expand(batch, -1)
        return torch.cat([seen.new_ones(batch, past - read), seen], 1)
    raise UnsupportedError(
        f"attention mask of type {type(mask).__name__} and shape {tuple(getattr(mask, 'shape', ()))}: the true "
        f"positions of {total} tokens cannot be read from it; pass a mask of shape (batch, tokens) with 1 at real "
        "tokens, or none"
    )
