"""Chosen lines of an attention matrix: which cells they are, and how much attention lies on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_ROWS = 64  # queries whose attention is built at a time


@dataclass(frozen=True, eq=False)
class HeadLines:
    """Vertical and slash lines chosen for every head of a layer, in one sequence.

    Queries are the last `queries` of the positions. A vertical line is a key position, a slash line an offset (query
    position less key position). Both are cut to the cells that exist: causal, and in a row that is a query.

    Attributes:
        vertical: which key positions.
        slash: which offsets.
        queries: number of rows of the matrix.
    """

    vertical: Bool[Tensor, "head key"]
    slash: Bool[Tensor, "head key"]
    queries: int

    @property
    def past(self) -> int:
        """Positions before the first query."""
        return self.vertical.shape[1] - self.queries

    def lengths(self) -> Int[Tensor, " key"]:
        """Cells of line number i, of either kind."""
        keys = self.vertical.shape[1]
        return torch.arange(keys, 0, -1, device=self.vertical.device).clamp(max=self.queries)

    def crossed(self, by: Bool[Tensor, "head key"]) -> Int[Tensor, "head key"]:
        """How many of the lines `by` of one kind cross each line of the other."""
        count = torch.nn.functional.pad(by.int().cumsum(1), (1, 0))
        # Lines j and o meet in row j + o, if that is a query: o from past - j to keys - 1 - j.
        before = count[:, : self.past + 1].flip(1)
        return count[:, 1:].flip(1) - torch.nn.functional.pad(before, (0, self.queries - 1))

    def cells(self) -> Int[Tensor, " head"]:
        """Cells on the lines, each counted once."""
        lengths = self.lengths()
        both = (self.vertical.long() + self.slash.long()) * lengths
        return (both - self.vertical * self.crossed(self.slash)).sum(1)

    def density(self) -> Float[Tensor, " head"]:
        """Cells on the lines over all cells."""
        return self.cells() / self.lengths().sum()

    def rows(self, at: Int[Tensor, " row"]) -> Bool[Tensor, "head row key"]:
        """Which keys the queries at these positions see."""
        keys = self.vertical.shape[1]
        offset = at[:, None] - torch.arange(keys, device=at.device)
        return (self.vertical[:, None] | self.slash[:, offset.clamp(min=0)]) & (offset >= 0)


def attention_of(
    query: Float[Tensor, "head row d_head"],
    key: Float[Tensor, "kv_head key d_head"],
    at: Int[Tensor, " row"],
    scaling: float | None = None,
) -> Float[Tensor, "head row key"]:
    """Causal attention of the queries at positions `at`, float32; None: scaled by one over the root of `d_head`."""
    kv_heads, keys, width = key.shape
    scaling = float(width**-0.5) if scaling is None else scaling
    grouped = query.float().reshape(kv_heads, -1, width) * scaling
    scores = (grouped @ key.float().mT).view(query.shape[0], -1, keys)
    future = torch.arange(keys, device=at.device) > at[:, None]
    return scores.masked_fill_(future, -torch.inf).softmax(-1)


def recovered(
    query: Float[Tensor, "head query d_head"],
    key: Float[Tensor, "kv_head key d_head"],
    lines: HeadLines,
    scaling: float | None = None,
) -> Float[Tensor, " head"]:
    """Share of all attention weight that lies on the lines: of the full matrix, every cell counted once."""
    found = torch.zeros(query.shape[0], dtype=torch.float64, device=query.device)
    for start in range(0, query.shape[1], _ROWS):
        part = query[:, start : start + _ROWS]
        at = lines.past + torch.arange(start, start + part.shape[1], device=query.device)
        found += (attention_of(part, key, at, scaling) * lines.rows(at)).sum((1, 2), dtype=torch.float64)
    return (found / query.shape[1]).float()
