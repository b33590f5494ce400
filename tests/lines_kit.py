"""Attention along lines written out: which cells lines hold, and the matrix of attention, from loops over both."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import Lines

Line = tuple[str, int]
"""Its kind, and its key or distance."""


def drawn(heads: int, keys: int, queries: int, vertical: float, slash: float, seed: int = 0) -> Lines:
    """Random lines, with the main diagonal: each with these probabilities."""
    generator = torch.Generator().manual_seed(seed)
    lines = Lines.of(
        torch.rand(heads, keys, generator=generator) < vertical,
        torch.rand(heads, keys, generator=generator) < slash,
        queries,
    )
    lines.offsets[:, :1] = True
    return lines


def drawn_scores(heads: int, queries: int, keys: int, seed: int, sharp: float = 3.0) -> Scores:
    """Random queries and keys; larger queries attend to fewer keys."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(heads, queries, 8, generator=generator) * sharp
    return Scores(query, torch.randn(max(1, heads // 2), keys, 8, generator=generator), 8**-0.5)


def offsets(queries: int, keys: int) -> Tensor:
    """How far each key lies before each query; negative after it."""
    return torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)


@cache
def lines_of(queries: int, keys: int) -> dict[Line, Tensor]:
    """The cells `[query key]` of each line."""
    offset = offsets(queries, keys)
    cells = {}
    for place in range(keys):
        cells["vertical", place] = (torch.arange(keys) == place) & (offset >= 0)
        cells["slash", place] = offset == place
    return cells


def on_lines(lines: Lines) -> Tensor:
    """Which cells `[head query key]` lie on lines."""
    offset = offsets(lines.grid.queries, lines.grid.keys)
    return (lines.columns[:, None] | lines.offsets[:, offset.clamp(min=0)]) & (offset >= 0)


def dense(scores: Scores, sees: Tensor | None = None) -> Tensor:
    """The matrix of attention `[head query key]`, of which only the cells `sees` are seen."""
    made = scores.query.double() @ per_head(scores.key, scores.heads).mT * scores.scaling
    offset = offsets(scores.queries, scores.keys)
    hidden = (offset < 0) | (offset >= (scores.window or scores.keys))
    if sees is not None:
        hidden = hidden | ~sees
    return made.masked_fill(hidden, -math.inf).softmax(-1)


def per_head(shared: Tensor, heads: int) -> Tensor:
    """Keys or values of each query head."""
    return shared.double().repeat_interleave(heads // len(shared), 0)
