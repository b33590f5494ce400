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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.files.records import Natural, Part, Whole, check_fields, conform
from sinkscope.interventions.base import Intervention, Run
from sinkscope.kv.loopserve.serve import SparsePrompts, said_of_prompts
from sinkscope.kv.session import Session
from sinkscope.lines.choice import HeadLines, last_votes, minference_lines


class Shape(Intervention):
    """Base of the fixed attention shapes for prompts: a frozen dataclass of sizes."""

    def __post_init__(self) -> None:
        check_fields(self)

    def sparse(self) -> SparsePrompts:
        """The sparse attention that reads prompts in this shape."""
        raise NotImplementedError

    def enter(self, run: Run, key: int) -> None:
        """Replace the attention of prompts."""
        self.sparse().enter(Session.of(run))

    def summary(self, run: Run) -> str:
        """The share of attention that was computed for prompts."""
        return said_of_prompts(type(self).__name__, run)


@dataclass(frozen=True, kw_only=True)
class AShape(Shape):
    """Every query of a prompt sees the first tokens and the latest ones (Xiao et al. 2024; Li et al. 2025, table 7).

    Attributes:
        first: Number of first tokens that all queries see.
        local: Number of latest tokens that a query sees, including itself.

    Raises:
        SinkscopeError: `first` is negative, or `local` is below 1.
        UnsupportedError: The model is a TransformerBridge.

    Example:
        >>> AShape().first, AShape().local
        (128, 4096)
    """

    first: Whole = 128
    local: Natural = 4096

    def sparse(self) -> SparsePrompts:
        """The sparse attention that reads prompts in this shape."""
        return SparsePrompts("AShape", self._lines)

    def _lines(self, query: Tensor, key: Tensor, scaling: float | None, layer: int) -> HeadLines:
        index = torch.arange(key.shape[1], device=key.device).expand(len(query), -1)
        return HeadLines(index < self.first, index < self.local, query.shape[1])


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

    def sparse(self) -> SparsePrompts:
        """The sparse attention that reads prompts in this shape."""
        return SparsePrompts("TriShape", self._lines, dense_rows=self.dense_rows)


@dataclass(frozen=True, kw_only=True)
class MInference(Shape):
    """Fixed numbers of vertical and slash lines, chosen for each head by the last queries (Jiang et al. 2024).

    The authors search for the best pattern of each head; here every head has the vertical-slash pattern. Their kernel
    computes whole blocks around slash lines; here only the lines themselves are computed, so that cell counts can be
    compared.

    Attributes:
        vertical: Number of vertical lines.
        slash: Number of slash lines.
        last: Number of last queries that vote.

    Raises:
        SinkscopeError: A number is below 1.
        UnsupportedError: The model is a TransformerBridge.

    Example:
        >>> MInference().vertical
        1000
    """

    vertical: Natural = 1000
    slash: Natural = 6096
    last: Natural = 64

    def sparse(self) -> SparsePrompts:
        """The sparse attention that reads prompts in this shape."""
        return SparsePrompts("MInference", self._lines)

    def _lines(self, query: Tensor, key: Tensor, scaling: float | None, layer: int) -> HeadLines:
        return minference_lines(query, key, self.vertical, self.slash, last=self.last, scaling=scaling)


_FIRST = 4
_PAPER = TriShape()
_LINES = MInference()


@dataclass(frozen=True)
class ShapeShare(Intervention):
    """A shape whose sizes are computed from the length of each prompt.

    Attributes:
        name: "AShape", "TriShape" or "MInference".
        budget: Share of the context, as defined in the module's docstring.

    Raises:
        SinkscopeError: The share is outside (0, 1].
    """

    name: str
    budget: float

    def __post_init__(self) -> None:
        conform(Part, self.budget, f"{self.name}: budget=", strict=True)

    def enter(self, run: Run, key: int) -> None:
        """Replace the attention of prompts."""
        _ByLength(self.name, _nothing, sized=lambda keys: _SHAPES[self.name](self.budget, keys)).enter(Session.of(run))


@dataclass(frozen=True, eq=False, kw_only=True)
class _ByLength(SparsePrompts):
    sized: Callable[[int], SparsePrompts]

    def _row(self, row: Any) -> Any:
        return self.sized(row.key.shape[1])._row(row)


def _nothing(query: Tensor, key: Tensor, scaling: float | None, layer: int) -> HeadLines:
    raise NotImplementedError


def shape_at(share: float, keys: int) -> AShape:
    """Numbers of first and local tokens for a share of a context."""
    tokens = max(1, int(share * keys))
    first = max(min(_FIRST, tokens - 1), tokens * _PAPER.first // (_PAPER.first + _PAPER.local))
    return AShape(first=first, local=tokens - first)


def _tri_shape_at(share: float, keys: int) -> TriShape:
    shape = shape_at(share, keys)
    return TriShape(first=shape.first, local=shape.local, dense_rows=shape.first)


_SHAPES: dict[str, Callable[[float, int], SparsePrompts]] = {
    "AShape": lambda share, keys: shape_at(share, keys).sparse(),
    "TriShape": lambda share, keys: _tri_shape_at(share, keys).sparse(),
    "MInference": lambda share, keys: SparsePrompts(
        "MInference", lambda query, key, scaling, layer: share_lines(query, key, share, scaling=scaling)
    ),
}
"""What makes prompts of so many keys sparse at a share of the context; MInference's is one of the causal cells."""


def share_lines(
    query: Float[Tensor, "head query d_head"],
    key: Float[Tensor, "kv_head key d_head"],
    share: float,
    *,
    last: int = _LINES.last,
    first: int = 30,
    local: int = 100,
    scaling: float | None = None,
) -> HeadLines:
    """Like `minference_lines`, with both numbers of lines scaled so that their cells take up the given share.

    Args:
        query: As for `select_lines`.
        key: As for `select_lines`.
        share: Share of the causal cells; each head gets the largest number of lines that does not exceed it.
        last: Number of last queries that vote.
        first: How many of 1,000 vertical lines are always the first positions.
        local: How many of 6,096 slash lines are always the nearest offsets; at least the main diagonal.
        scaling: Factor on the scores. None means 1 / sqrt(d_head).
    """
    columns, offsets = last_votes(query, key, last, scaling)

    def lines(count: Int[Tensor, " head"]) -> HeadLines:
        vertical = count * _LINES.vertical // _LINES.slash
        return HeadLines(
            _top(columns, vertical.clamp(min=1), vertical * first // _LINES.vertical),
            _top(offsets, count, (count * local // _LINES.slash).clamp(min=1)),
            query.shape[1],
        )

    low = torch.ones(len(query), dtype=torch.long, device=query.device)
    high = torch.full_like(low, key.shape[1] + 1)  # all slash lines and one
    limit = share * float(lines(low).lengths().sum())
    while bool((high - low > 1).any()):
        middle = (low + high) // 2
        fits = lines(middle).cells() <= limit
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    return lines(low)


def _top(weights: Float[Tensor, "head key"], count: Int[Tensor, " head"], forced: Int[Tensor, " head"]) -> Tensor:
    """The first `forced` lines of each head and the heaviest others, `count` together."""
    index = torch.arange(weights.shape[1], device=weights.device).expand_as(weights)
    order = weights.masked_fill(index < forced[:, None], torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, index)
    return rank < count[:, None]
