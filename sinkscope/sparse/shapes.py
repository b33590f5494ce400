"""Fixed shapes of attention for prompts, as baselines: A-shape, Tri-shape, and MInference's vertical-slash pattern.

They change only how prompts are read; decoding reads the whole cache, as in the papers. The pattern is applied even if
plain attention would be faster. Layers that need the model's own attention keep it, and an event of kind "prefill"
reports this, as under `LoopServe`.

With `budget`, a share of the context takes the place of the sizes, so that a shape can be compared with policies at the
same share. For a policy, the share is the fraction of tokens that a decoding step reads. For a shape, which only
concerns prompts, it is defined as follows:

- A-shape, Tri-shape: first and local tokens together are that share of the context, in the proportion of LoopServe's
  table 7 (128 to 4,096; at least 4 first tokens, as in StreamingLLM). As in that table, Tri-shape has as many dense
  rows as first tokens. A query then sees at most that share, and the share of causal cells is about twice as large.
- MInference: for each head, as many lines as fit into that share of the causal cells, with vertical and slash lines in
  the usual proportion (1,000 to 6,096), and at least one line of each kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sinkscope.files.records import Natural, PositiveShare, Whole, share_of
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import Lines
from sinkscope.sparse.head_lines import SLASH, VERTICAL, minference_lines
from sinkscope.sparse.sparse_prompts import SparsePrompts

FIRST, LOCAL = 128, 4096  # LoopServe's table 7
_LEAST_FIRST = 4


class Shape(SparsePrompts):
    """Base of the fixed attention shapes for prompts: a frozen dataclass of sizes, and `budget` in place of these."""


@dataclass(frozen=True, kw_only=True)
class AShape(Shape):
    """Every query of a prompt sees the first tokens and the latest ones (Xiao et al. 2024; Li et al. 2025, table 7).

    Attributes:
        first: Number of first tokens that all queries see.
        local: Number of latest tokens that a query sees, including itself.
        dense_rows: Number of last queries that see everything.
        budget: Share of the context that gives these numbers. None: they are as given.

    Raises:
        SinkscopeError: `first` is negative, `local` is below 1, or the share is outside (0, 1].

    Example:
        >>> AShape().first, AShape().local
        (128, 4096)
    """

    first: Whole = FIRST
    local: Natural = LOCAL
    dense_rows: Whole = 0
    budget: PositiveShare | None = None

    def lines(self, scores: Scores, layer: int) -> Lines:
        """Return the first columns and the nearest offsets, and the last rows."""
        first, local, dense_rows = self.first, self.local, self.dense_rows
        if self.budget is not None:
            tokens = max(1, share_of(self.budget, scores.keys))
            first = max(tokens * FIRST // (FIRST + LOCAL), min(_LEAST_FIRST, tokens - 1))
            local = tokens - first
            dense_rows = first if self.dense_rows else 0
        index = torch.arange(scores.keys, device=scores.key.device).expand(scores.heads, -1)
        return Lines.of(index < first, index < local, scores.queries, dense_rows)


@dataclass(frozen=True, kw_only=True)
class TriShape(AShape):
    """`AShape`, except that the last queries of a prompt see everything (SCBench, Li et al. 2025; LoopServe's table 7).

    Example:
        >>> TriShape().dense_rows
        128
    """

    dense_rows: Whole = FIRST


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
        budget: Share of the causal cells that gives the numbers of lines. None: they are as given.

    Raises:
        SinkscopeError: A number is below 1, or the share is outside (0, 1].

    Example:
        >>> MInference().vertical
        1000
    """

    vertical: Natural = VERTICAL
    slash: Natural = SLASH
    last: Natural = 64
    budget: PositiveShare | None = None

    def lines(self, scores: Scores, layer: int) -> Lines:
        """Return the heaviest lines of each head, as many of each kind as given."""
        return minference_lines(scores, self.vertical, self.slash, last=self.last, share=self.budget)
