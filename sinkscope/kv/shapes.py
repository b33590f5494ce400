"""Fixed shapes of attention for prompts, as baselines: A-shape, Tri-shape, and MInference's vertical-slash pattern.

They change only how prompts are read. Decoding reads the whole cache, as in the papers. The pattern is followed even if
plain attention would be faster. Layers that need the model's own attention keep it, and an event of kind "prefill" says
so, as under `LoopServe`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinkscope.interventions.base import Intervention, Run
from sinkscope.kv.loopserve.serve import SparsePrompts, said_of_prompts
from sinkscope.kv.session import Session
from sinkscope.lines.choice import HeadLines, minference_lines
from sinkscope.records import Natural, Whole, check_fields


@dataclass(frozen=True, kw_only=True)
class AShape(Intervention):
    """Every query of a prompt sees the first tokens and the latest ones (Xiao et al. 2024; Li et al. 2025, table 7).

    Attributes:
        first: number of tokens at the beginning that all queries see.
        local: number of latest tokens that a query sees, including itself.

    Raises:
        SinkscopeError: `first` is negative, or `local` is below 1.
        UnsupportedError: the model is a TransformerBridge.

    Example:
        >>> AShape().first, AShape().local
        (128, 4096)
    """

    first: Whole = 128
    local: Natural = 4096

    def __post_init__(self) -> None:
        check_fields(self)

    def told(self, run: Run) -> str:
        """The share of attention that prompts computed."""
        return said_of_prompts(type(self).__name__, run)

    def enter(self, run: Run, key: int) -> None:
        """Replace attention of prompts."""
        SparsePrompts(type(self).__name__, self._lines).enter(Session.of(run))

    def _lines(self, query: Tensor, key: Tensor, scaling: float | None, layer: int) -> HeadLines:
        index = torch.arange(key.shape[1], device=key.device).expand(len(query), -1)
        return HeadLines(index < self.first, index < self.local, query.shape[1])


@dataclass(frozen=True, kw_only=True)
class TriShape(AShape):
    """`AShape`, and the last queries of a prompt see everything (SCBench, Li et al. 2025; LoopServe's table 7).

    Attributes:
        dense_rows: number of these queries.

    Example:
        >>> TriShape().dense_rows
        128
    """

    dense_rows: Whole = 128

    def enter(self, run: Run, key: int) -> None:
        """Replace attention of prompts."""
        SparsePrompts("TriShape", self._lines, dense_rows=self.dense_rows).enter(Session.of(run))


@dataclass(frozen=True, kw_only=True)
class MInference(Intervention):
    """Fixed numbers of vertical and slash lines, which the last queries choose for each head (Jiang et al. 2024).

    The authors search a pattern for every head of a model; here every head has the vertical-slash pattern. Their kernel
    computes whole blocks around slash lines; here only the lines are computed, so that numbers of cells can be
    compared.

    Attributes:
        vertical: number of vertical lines.
        slash: number of slash lines.
        last: number of queries that vote.

    Raises:
        SinkscopeError: a number is below 1.
        UnsupportedError: the model is a TransformerBridge.

    Example:
        >>> MInference().vertical
        1000
    """

    vertical: Natural = 1000
    slash: Natural = 6096
    last: Natural = 64

    def __post_init__(self) -> None:
        check_fields(self)

    def told(self, run: Run) -> str:
        """The share of attention that prompts computed."""
        return said_of_prompts("MInference", run)

    def enter(self, run: Run, key: int) -> None:
        """Replace attention of prompts."""
        SparsePrompts("MInference", self._lines).enter(Session.of(run))

    def _lines(self, query: Tensor, key: Tensor, scaling: float | None, layer: int) -> HeadLines:
        return minference_lines(query, key, self.vertical, self.slash, last=self.last, scaling=scaling)
