"""The record of a forward call, which everything that acts in the call reads.

A call may be a whole prompt, a chunk of one, one generated token, a later turn, or (without a cache) the whole prefix
again; rows may be padded on either side. `calls` makes the record at the beginning of the call.

A *column* counts the tokens of a row with padding, as masks and caches of transformers do. A *position* counts the real
tokens of a row from 0: a row is one text.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

ROWS = "sinkscope_rows"
"""The attribute of a cache that holds what is known of its rows (`RowState`), by the number of the run."""


@dataclass(frozen=True, eq=False)
class TokenPositions:
    """The tokens of a batch, by column.

    Attributes:
        pos: Position of every token in its row; -1 at padding.
        length: Number of real tokens in each row.
        n_columns: Number of columns.
    """

    pos: Int[Tensor, "batch seen"]
    length: Int[Tensor, " batch"]
    n_columns: int

    @classmethod
    def of(cls, pos: Int[Tensor, "batch seen"]) -> TokenPositions:
        """Return tokens with these positions."""
        return cls(pos, (pos >= 0).sum(1), pos.shape[1])

    @cached_property
    def padded(self) -> int:
        """Number of the first columns among which all padding is; whoever asks first waits for the device."""
        columns = (self.pos < 0).any(0).nonzero()
        return int(columns[-1]) + 1 if len(columns) else 0

    def first(self, count: int) -> TokenPositions:
        """Return the first columns alone."""
        if count >= self.n_columns:
            return self
        return TokenPositions.of(self.pos[:, :count])

    def continued(self, real: Bool[Tensor, "batch new"]) -> TokenPositions:
        """Return the tokens with columns after them, of which some are real and others padding."""
        pos = torch.where(real, self.length[:, None] + real.cumsum(1) - 1, -1)
        return TokenPositions(torch.cat([self.pos, pos], 1), self.length + real.sum(1), self.n_columns + real.shape[1])

    def columns_of(self, pos: Int[Tensor, "batch head slot"]) -> Int[Tensor, "batch head slot"]:
        """Return the column of the token at each position; -1 where the position is -1."""
        columns = self._column_table.to(pos.device)
        row = torch.arange(len(pos), device=pos.device)[:, None, None]
        return columns[row, pos]  # -1 is the last place

    @cached_property
    def _column_table(self) -> Int[Tensor, "batch _"]:
        """The column of each position of a row; -1 after them."""
        columns = self.pos.new_full((len(self.pos), self.n_columns + 1), -1)
        row = torch.arange(len(self.pos), device=self.pos.device)[:, None]
        columns[row, self.pos] = torch.arange(self.n_columns, device=self.pos.device)
        columns[:, -1] = -1  # what padding wrote
        return columns


@dataclass(eq=False)
class RowState:
    """What a block knows of the rows that share a cache.

    Attributes:
        tokens: The tokens read so far.
        partial: Whether the first tokens were read before the block was entered.
        known: What edits, policies, guards and counters know of the rows, by their keys: tensors with a row each, and
            objects whose `take` gives what is known of other rows, or None for nothing.
        drafts_from: First column that is no part of the prompt, where assisted generation reads tokens together with it
            that it may take back; None if all that is read is said.
        prefilling: Whether the last call read a prompt or part of one.
        prompt: Number of real tokens in each row at the end of the last prefill; empty before it.
        decoded: Number of single-token calls since then.
    """

    tokens: TokenPositions
    partial: bool = False
    known: dict[Hashable, Any] = field(default_factory=dict)
    drafts_from: int | None = None
    prefilling: bool = False
    prompt: tuple[int, ...] = ()
    decoded: int = 0

    def take(self, rows: Int[Tensor, " row"]) -> None:
        """Take rows of the batch, by their numbers, in place of the present ones."""
        self.tokens = TokenPositions.of(self.tokens.pos[rows.to(self.tokens.pos.device)])
        if self.prompt:
            self.prompt = tuple(torch.tensor(self.prompt)[rows.cpu()].tolist())
        taken: dict[Hashable, Any] = {}
        for key, value in self.known.items():
            of_rows = value[rows.to(value.device)] if isinstance(value, Tensor) else value.take(rows)
            if of_rows is not None:
                taken[key] = of_rows
        self.known = taken


class TakeBack(NamedTuple):
    """Tokens that leave the output and the cache, although they were written.

    Attributes:
        length: Number of columns that stay.
        reread: The last token that stays, which is read again behind them.
    """

    length: int
    reread: int


@dataclass(eq=False)
class Draft:
    """A text that is being written, of which actors may take tokens back.

    Attributes:
        cache: The cache that holds it.
        allowance: How many tokens may still be taken back.
        taken: What an actor has taken back in the latest call; None if nothing.
        can_go_back: Returns whether what chooses the tokens can go back with the text; None if it always can.
    """

    cache: Any
    allowance: int
    taken: TakeBack | None = None
    can_go_back: Callable[[], bool] | None = None


@dataclass(eq=False)
class Step:
    """One forward call of the model.

    Attributes:
        number: Number of the call within the block, from 0.
        past: Number of columns (tokens with padding) in the cache before the call.
        new: Number of columns that the call reads.
        ids: Ids of these tokens, if they are given as ids.
        cache: The cache that the call continues; None if it was given none.
        arguments: The arguments of the call, by name.
        earlier: The tokens before the call.
        state: What is known about these rows from earlier calls.
        layers: The layers of the cache that can evict; empty if nothing owns the cache.
        has_gaps: Whether the cache lacks tokens, once all have acted on it, so that the place of a key is not its
            column.
        decodes: Whether it reads a generated token into a cache that can evict.
        prefill_ended: Whether this is the first single-token call after a prompt.
        prompting: Whether `generate` is reading a prompt, so that even a single token is a part of it.
        anchors: Number of first positions that policies and guards of the run keep.
        settings: Settings of the `generate` that makes the call; None outside of one.
        logits: Logits of the last token of each row, once they exist; actors may change them in place.
        draft: The text to which the call belongs, if tokens can be taken back from it.
    """

    number: int
    past: int
    new: int
    ids: Int[Tensor, "batch pos"] | None
    cache: Any
    arguments: Mapping[str, Any]
    earlier: TokenPositions
    state: RowState
    layers: list[Any] = field(default_factory=list)
    has_gaps: bool = False
    decodes: bool = False
    prefill_ended: bool = False
    prompting: bool = False
    anchors: int = 0
    settings: Any = None
    logits: Tensor | None = None
    draft: Draft | None = None

    @property
    def tokens(self) -> TokenPositions:
        """All tokens so far."""
        return self.state.tokens

    @cached_property
    def index(self) -> Int[Tensor, "batch pos"]:
        """Position of each new token in its row; -1 at padding."""
        return self.tokens.pos[:, self.past :]

    @cached_property
    def by_number(self) -> dict[int, Any]:
        """The layers of the cache that can evict, by the number of the decoder layer."""
        return {kv.number: kv for kv in self.layers}

    def on(self, device: torch.device) -> Int[Tensor, "batch pos"]:
        """Return `index` on the device of a layer; a model may be spread over several."""
        return self.index.to(device)
