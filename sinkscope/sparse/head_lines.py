"""The vertical and slash lines of every head of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from sinkscope.models.draws import draws
from sinkscope.sparse.attention import Scores


@dataclass(frozen=True, eq=False)
class HeadLines:
    """Vertical and slash lines chosen for every head of a layer in one sequence, or several such choices.

    Queries are the last `queries` of the positions. A vertical line is a key position, a slash line an offset (query
    position less key position). Both are restricted to causal cells of these queries.

    Attributes:
        chosen: Whether each key position is chosen, and each offset.
        queries: Number of rows of the matrix.
        dense_rows: So many queries at the end see everything.
    """

    chosen: Bool[Tensor, "*choice head kind key"]
    queries: int
    dense_rows: int = 0

    @classmethod
    def of(
        cls,
        vertical: Bool[Tensor, "*choice head key"],
        slash: Bool[Tensor, "*choice head key"],
        queries: int,
        dense_rows: int = 0,
    ) -> HeadLines:
        """Return the lines at these key positions and offsets."""
        return cls(torch.stack([vertical, slash], -2), queries, dense_rows)

    @property
    def vertical(self) -> Bool[Tensor, "*choice head key"]:
        """Whether each key position is chosen; a view of `chosen`."""
        return self.chosen[..., 0, :]

    @property
    def slash(self) -> Bool[Tensor, "*choice head key"]:
        """Whether each offset is chosen; a view of `chosen`."""
        return self.chosen[..., 1, :]

    @property
    def past(self) -> int:
        """Number of positions before the first query."""
        return self.chosen.shape[-1] - self.queries

    def lengths(self) -> Int[Tensor, " key"]:
        """Return the number of cells of line i; it is the same for both kinds."""
        keys = self.chosen.shape[-1]
        return torch.arange(keys, 0, -1, device=self.chosen.device).clamp(max=self.queries)

    @property
    def dense(self) -> Bool[Tensor, "*choice head"]:
        """Which heads have all cells."""
        return self.attended() == 1

    def cells(self) -> Int[Tensor, "*choice head"]:
        """Return the number of cells on the lines, each counted once, without what dense rows see besides."""
        both = self.chosen.sum(-2) * self.lengths()
        return (both - self.vertical * crossing_counts(self.slash, self.past)).sum(-1)

    def attended(self) -> Float[Tensor, "*choice head"]:
        """Return the share of all causal cells on the lines or in dense rows."""
        every, rows = self.lengths().sum(), min(self.dense_rows, self.queries)
        body = HeadLines(self.chosen[..., : self.chosen.shape[-1] - rows], self.queries - rows)
        return (body.cells() + every - body.lengths().sum()) / every

    def rows(self, at: Int[Tensor, " row"]) -> Bool[Tensor, "*choice head row key"]:
        """Return which keys the queries at positions `at` see."""
        keys = self.chosen.shape[-1]
        offset = at[:, None] - torch.arange(keys, device=at.device)
        dense = (at >= keys - self.dense_rows)[:, None]
        return (self.vertical[..., None, :] | self.slash[..., offset.clamp(min=0)] | dense) & (offset >= 0)

    def random(self, seed: int, purpose: str, *, cells: bool) -> HeadLines:
        """Draw random lines in place of these, per kind: the same number, or with `cells` the same lengths.

        Seed and purpose are those of `models.draws.draws`.
        """
        generator = draws(seed, purpose)
        length = self.lengths()
        if not cells:
            length = torch.ones_like(length)
        order = torch.rand(2, self.chosen.shape[-3], len(length), generator=generator).argsort(-1).transpose(0, 1)
        drawn = length[order]
        reached = drawn.cumsum(-1) - drawn / 2  # a line is taken if more than half of it still fits
        wanted = (self.chosen * length).sum(-1, keepdim=True)
        order = order.to(wanted.device).expand_as(self.chosen)
        return HeadLines(torch.zeros_like(self.chosen).scatter_(-1, order, reached < wanted), self.queries)


def near_lines(scores: Scores, first: int, local: int, dense_rows: int = 0) -> HeadLines:
    """Choose the first columns and the nearest offsets of every head, and the last rows."""
    index = torch.arange(scores.keys, device=scores.key.device).expand(scores.heads, -1)
    return HeadLines.of(index < first, index < local, scores.queries, dense_rows)


def crossing_counts(lines: Shaped[Tensor, "*n line"], past: int) -> Shaped[Tensor, "*n line"]:
    """Count, for each line of the other kind, how many of these cross it, if the first query is at position `past`."""
    # Lines j and o meet in row j + o, if that row is a query: o runs from past - j to keys - 1 - j.
    count = lines.cumsum(-1).flip(-1)
    count[..., :past] -= lines[..., :past].cumsum(-1).flip(-1)
    return count
