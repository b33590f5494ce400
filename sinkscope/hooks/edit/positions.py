"""True positions of the tokens of a forward call: their positions among the real tokens of each row.

A call may be a whole prompt, a chunk of one, one generated token, a later turn, or (without a cache) the whole prefix
again; rows may be padded on either side. What has to survive between calls is kept in a `GrowingBatch`, which is found
by the cache object that the calls share, so interleaved generations do not mix.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from einops import reduce
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.models.call_cache import tokens_in
from sinkscope.tap.rows import shown


class Memory(dict[str, Tensor]):
    """Per-row values that an edit stores; NaN if a row has none yet."""

    def keep(
        self, name: str, values: Float[Tensor, "batch pos neuron"], at: Bool[Tensor, "batch pos"]
    ) -> Float[Tensor, "batch neuron"]:
        """Store the value where `at` holds (at most once per row); other rows keep their former value.

        Gradients flow through what is returned, within the call; for later calls it is a constant.
        """
        # No synchronisation with the device: rows without a hit are chosen by `where`, not by indexing.
        here = torch.where(at[..., None], values, 0).sum(1)
        value = torch.where(at.any(1, keepdim=True), here, self.get(name, torch.nan))
        self[name] = value.detach()
        return value


@dataclass(frozen=True, eq=False)
class TokenPositions:
    """True positions of the tokens of a batch.

    Attributes:
        pos: True position of every token; -1 at padding.
    """

    pos: Int[Tensor, "batch seen"]

    @property
    def seen(self) -> int:
        """Number of all tokens."""
        return self.pos.shape[1]

    @cached_property
    def length(self) -> Int[Tensor, " batch"]:
        """Number of real tokens in each row."""
        return (self.pos >= 0).sum(1)

    @cached_property
    def padded(self) -> int:
        """Number of the first tokens among which all padding is; whoever asks first waits for the device."""
        columns = (self.pos < 0).any(0).nonzero()
        return int(columns[-1]) + 1 if len(columns) else 0

    def read(self, real: Bool[Tensor, "batch new"]) -> TokenPositions:
        """Return these tokens and others, of which some are real."""
        later = torch.where(real, self.length[:, None] + real.cumsum(1) - 1, -1)
        return TokenPositions(torch.cat([self.pos, later], 1))

    def first(self, count: int) -> TokenPositions:
        """Return the first tokens alone."""
        return TokenPositions(self.pos[:, :count])


@dataclass(eq=False)
class GrowingBatch:
    """A batch of token sequences that grows over several calls.

    Attributes:
        columns: The tokens read so far.
        partial: Whether the first tokens were read before the run was entered.
        memory: What each edit stores, by the edit's key.
    """

    columns: TokenPositions
    partial: bool = False
    memory: dict[Hashable, Memory] = field(default_factory=dict)

    def copy(self) -> GrowingBatch:
        """Return the sequence as it is now."""
        memory = {key: Memory(kept) for key, kept in self.memory.items()}
        return replace(self, memory=memory)

    def take(self, rows: Int[Tensor, " row"]) -> None:
        """Let the rows be others of the batch, by their numbers: as generation repeats and reorders them."""

        def taken(of_rows: Tensor) -> Tensor:
            return of_rows[rows.to(of_rows.device)]

        self.columns = TokenPositions(taken(self.columns.pos))
        for memory in self.memory.values():
            for name, values in memory.items():
                memory[name] = taken(values)


@dataclass(eq=False)
class Call:
    """One forward call of the model.

    Attributes:
        step: Number of the call within the run, from 0.
        rows: Number of rows.
        past: Number of tokens (with padding) in the cache before the call.
        new: Number of tokens of a row that the call reads.
        tokens: All tokens so far.
        sequence: What is known about these rows from earlier calls.
    """

    step: int
    rows: int
    past: int
    new: int
    tokens: TokenPositions
    sequence: GrowingBatch

    @cached_property
    def index(self) -> Int[Tensor, "batch pos"]:
        """True position of each new token among the real tokens of its row; -1 at padding."""
        return self.tokens.pos[:, self.past :]

    @property
    def columns(self) -> Int[Tensor, "batch seen"]:
        """The same for every token so far, the new ones last."""
        return self.tokens.pos

    @cached_property
    def earlier(self) -> TokenPositions:
        """The tokens before the call."""
        return self.tokens.first(self.past)

    @property
    def before(self) -> Int[Tensor, " batch"]:
        """Number of real tokens in each row before the call."""
        return self.earlier.length

    def on(self, device: torch.device) -> Int[Tensor, "batch pos"]:
        """Return `index` on the device of a layer; a model may be spread over several."""
        if self.index.device != device:
            self.index = self.index.to(device)
        return self.index


class Tracker:
    """Turns the arguments of forward calls into `Call`s; one per run."""

    def __init__(self) -> None:
        self._sequences: WeakKeyDictionary[Any, GrowingBatch] = WeakKeyDictionary()
        self._steps = 0

    def begin(
        self,
        tokens: Shaped[Tensor, "batch pos *d_model"],
        mask: Any = None,
        cache: Any = None,
    ) -> Call:
        """Begin a forward call.

        Args:
            tokens: Token ids or input embeddings.
            mask: Attention mask as transformers passes it: 2-D (1 = real), 4-D (bool or additive), a dict of these by
                layer type, or None. Tokens read in an earlier call keep the mask of that call.
            cache: The cache that the call continues, if any.
        """
        batch, new = int(tokens.shape[0]), int(tokens.shape[1])
        past = 0 if cache is None else tokens_in(cache)
        sequence = self._sequence(cache, batch, past, tokens.device)
        earlier = sequence.columns.first(past)  # tokens may have been taken back
        # Some may have been read in calls that this run did not act on; they come first.
        if isinstance(mask, dict):  # per layer type, as generation builds it for caches of fixed size
            mask = mask.get("full_attention", next(iter(mask.values()), None))
        if mask is None:
            real = tokens.new_ones(batch, past + new - earlier.seen, dtype=torch.bool)
        else:
            real = _real(mask, batch, earlier.seen, past, new).to(tokens.device)
        sequence.columns = earlier.read(real)
        call = Call(self._steps, batch, past, new, sequence.columns, sequence)
        self._steps += 1
        return call

    def bind(self, sequence: GrowingBatch, cache: Any) -> None:
        """Associate a cache with its sequence, so that a later call finds it."""
        if cache not in self._sequences:
            self._sequences[cache] = sequence

    def _sequence(self, cache: Any, batch: int, past: int, device: torch.device) -> GrowingBatch:
        """The sequence that a call continues, or a new one."""
        sequence = None
        if cache is not None:
            sequence = self._sequences.get(cache)
        if sequence is not None and past > 0:
            times, rest = divmod(batch, sequence.columns.pos.shape[0])  # `len` of a tensor takes three times as long
            if times > 1 and rest == 0:
                sequence.take(torch.arange(batch // times).repeat_interleave(times))
            if rest == 0:
                return sequence
        columns = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        sequence = GrowingBatch(TokenPositions(columns), past > 0)
        if cache is not None:
            self._sequences[cache] = sequence
        return sequence


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
