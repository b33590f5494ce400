"""Fixed shapes of attention for prompts, as baselines: A-shape, Tri-shape, and MInference's vertical-slash pattern.

They change only how prompts are read; decoding reads the whole cache, as in the papers. The pattern is applied even if
plain attention would be faster. Layers that need the model's own attention keep it, and an event of kind "prefill"
reports this, as under `LoopServe`.

`ShapeShare` makes a shape for a given share of the context, so that it can be compared with policies at the same share.
For a policy, the share is the fraction of tokens that a decoding step reads. For a shape, which only concerns prompts,
it is defined as follows:

- A-shape, Tri-shape: first and local tokens together are that share of the context, in the proportion of LoopServe's
  table 7 (128 to 4,096; at least 4 first tokens, as in StreamingLLM). As in that table, Tri-shape has as many dense
  rows as first tokens. A query then sees at most that share, and the share of causal cells is about twice as large.
- MInference: for each head, as many lines as fit into that share of the causal cells, with vertical and slash lines in
  the usual proportion (1,000 to 6,096), and at least one line of each kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.files.records import Natural, PositiveShare, Whole, share_of
from sinkscope.lines.attention import Scores
from sinkscope.lines.head_lines import HeadLines, near_lines
from sinkscope.lines.serve.sparse_prompts import SparsePrompts
from sinkscope.lines.votes import heaviest, last_votes, minference_lines


class Shape(SparsePrompts):
    """Base of the fixed attention shapes for prompts: a frozen dataclass of sizes."""


@dataclass(frozen=True, kw_only=True)
class AShape(Shape):
    """Every query of a prompt sees the first tokens and the latest ones (Xiao et al. 2024; Li et al. 2025, table 7).

    Attributes:
        first: Number of first tokens that all queries see.
        local: Number of latest tokens that a query sees, including itself.

    Raises:
        SinkscopeError: `first` is negative, or `local` is below 1.

    Example:
        >>> AShape().first, AShape().local
        (128, 4096)
    """

    first: Whole = 128
    local: Natural = 4096

    def lines(self, scores: Scores, layer: int) -> HeadLines:
        """Return the first columns and the nearest offsets."""
        return near_lines(scores, self.first, self.local)


@dataclass(frozen=True, kw_only=True)
class TriShape(AShape):
    """`AShape`, except that the last queries of a prompt see everything (SCBench, Li et al. 2025; LoopServe's table 7).

    Attributes:
        dense_rows: Number of last queries that see everything.

    Example:
        >>> TriShape().dense_rows
        128
    """

    dense_rows: Whole = 128

    def lines(self, scores: Scores, layer: int) -> HeadLines:
        """Return the first columns and the nearest offsets, and the last rows."""
        return near_lines(scores, self.first, self.local, self.dense_rows)


@dataclass(frozen=True, kw_only=True)
class MInference(Shape):
    """Fixed numbers of vertical and slash lines, chosen for each head by the last queries (Jiang et al. 2024).

    The authors search, for each head of a model, which of three patterns is closest to full attention: A-shape,
    vertical-slash or block-sparse. This is one of the three, in every head: vertical-slash. Their kernel computes whole
    blocks around slash lines; here only the lines themselves are computed, so that cell counts can be compared.

    Attributes:
        vertical: Number of vertical lines.
        slash: Number of slash lines.
        last: Number of last queries that vote.

    Raises:
        SinkscopeError: A number is below 1.

    Example:
        >>> MInference().vertical
        1000
    """

    vertical: Natural = 1000
    slash: Natural = 6096
    last: Natural = 64

    @property
    def choice_rows(self) -> int:
        """The queries that vote."""
        return self.last

    def lines(self, scores: Scores, layer: int) -> HeadLines:
        """Return the heaviest lines of each head, as many of each kind as given."""
        return minference_lines(scores, self.vertical, self.slash, last=self.last)


_LEAST_FIRST = 4
_TABLE_7 = TriShape()  # LoopServe's table 7
_USUAL_LINES = MInference()


@dataclass(frozen=True)
class ShapeShare(Shape):
    """A shape whose sizes are computed from the length of each prompt.

    Attributes:
        name: "AShape", "TriShape" or "MInference".
        budget: Share of the context, as defined in the module's docstring.

    Raises:
        SinkscopeError: The share is outside (0, 1].
    """

    name: str
    budget: PositiveShare

    @property
    def choice_rows(self) -> int:
        """The queries that vote for lines."""
        return _USUAL_LINES.last if self.name == "MInference" else 0

    def lines(self, scores: Scores, layer: int) -> HeadLines:
        """Return lines of the shape at its size for these keys."""
        if self.name == "MInference":
            return share_lines(scores, self.budget)
        shape = shape_at(self.budget, scores.keys)
        return near_lines(scores, shape.first, shape.local, shape.first if self.name == "TriShape" else 0)


def shape_at(share: float, keys: int) -> AShape:
    """Compute the numbers of first and local tokens for a share of a context."""
    tokens = max(1, share_of(share, keys))
    first = tokens * _TABLE_7.first // (_TABLE_7.first + _TABLE_7.local)
    first = max(first, min(_LEAST_FIRST, tokens - 1))
    return AShape(first=first, local=tokens - first)


def share_lines(scores: Scores, share: float) -> HeadLines:
    """Choose lines like `minference_lines`, both numbers scaled so that their cells take up the given share.

    As many of the first positions and nearest offsets are always among them: 30 of 1,000 and 100 of 6,096.

    Args:
        scores: As for `select_lines`.
        share: Share of the causal cells; each head gets the largest number of lines that does not exceed it.
    """
    column_votes, offset_votes = last_votes(scores, _USUAL_LINES.last)

    def lines(slash: Int[Tensor, "head 1"]) -> HeadLines:
        vertical = slash * _USUAL_LINES.vertical // _USUAL_LINES.slash
        nearest = (slash * 100 // _USUAL_LINES.slash).clamp(min=1)
        return HeadLines.of(
            heaviest(column_votes, vertical.clamp(min=1), vertical * 30 // _USUAL_LINES.vertical),
            heaviest(offset_votes, slash, nearest),
            scores.queries,
        )

    fits = torch.ones(scores.heads, 1, dtype=torch.long, device=scores.key.device)
    too_many = torch.full_like(fits, scores.keys + 1)  # all slash lines and one
    limit = share * float(lines(fits).lengths().sum())
    while bool((too_many - fits > 1).any()):
        middle = (fits + too_many) // 2
        within = lines(middle).cells()[:, None] <= limit
        fits = torch.where(within, middle, fits)
        too_many = torch.where(within, too_many, middle)
    return lines(fits)
