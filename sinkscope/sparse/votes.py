"""The heaviest lines of each head, by the sums of all queries or by the votes of the last (MInference)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.files.records import Natural, check_values
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.head_lines import HeadLines
from sinkscope.sparse.sums import line_sums

# MInference's numbers of lines, and how many of them are always the first columns and the nearest offsets.
VERTICAL, SLASH, EARLIEST, NEAREST = 1000, 6096, 30, 100


def top_lines(weights: Float[Tensor, "head kind key"], etas: Sequence[float], length: int | None = None) -> HeadLines:
    """Choose the heaviest `eta * 2 * length` lines of both kinds together, at least one, but none without weight.

    Args:
        weights: Weights of the lines over all queries.
        etas: Shares of lines; one choice is made for each.
        length: Length in the formula. None means the number of key positions.
    """
    both, keys = weights.flatten(1), weights.shape[2]
    most = [max(1, math.floor(eta * 2 * (length or keys) + 1e-9)) for eta in etas]
    chosen = heaviest(both, torch.tensor(most, device=both.device)[:, None, None], 0) & (both > 0)
    return HeadLines(chosen.unflatten(-1, (2, keys)), keys)


def last_votes(scores: Scores, last: int) -> tuple[Tensor, ...]:
    """Sum the attention of the last queries along vertical lines and along slash lines: "head key" of each."""
    scores.check_plain()
    return line_sums(scores.part(max(scores.past, scores.keys - last), scores.keys)).unbind(1)


@torch.no_grad()
def minference_lines(
    scores: Scores,
    vertical: int = VERTICAL,
    slash: int = SLASH,
    *,
    last: int = 64,
    first: int = EARLIEST,
    local: int = NEAREST,
) -> HeadLines:
    """Choose fixed numbers of lines by the votes of the last queries: MInference's pattern (Jiang et al. 2024).

    The authors' kernel computes whole blocks around the slash lines; here only the lines themselves are kept.

    Args:
        scores: As for `select_lines`.
        vertical: Number of vertical lines to keep.
        slash: Number of slash lines to keep.
        last: Number of last queries that vote.
        first: Number of first positions that are always kept; they count towards `vertical`.
        local: Number of offsets from 0 that are always kept; they count towards `slash`.

    Raises:
        SinkscopeError: A number is below 1.
    """
    check_values(Natural, vertical=vertical, slash=slash, last=last, local=local)
    column_votes, offset_votes = last_votes(scores, last)
    columns = heaviest(column_votes, vertical, min(first, vertical))
    return HeadLines.of(columns, heaviest(offset_votes, slash, min(local, slash)), scores.queries)


def heaviest(
    weights: Float[Tensor, "head line"], count: int | Int[Tensor, "*choice _ 1"], always: int | Int[Tensor, "head 1"]
) -> Bool[Tensor, "*choice head line"]:
    """Choose the first `always` lines of each head, and the heaviest others, `count` together; for several counts."""
    index = torch.arange(weights.shape[1], device=weights.device).expand_as(weights)
    weights = weights.masked_fill(index < always, torch.inf)
    rank = weights.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return rank < count
