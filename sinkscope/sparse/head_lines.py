"""Vertical and slash lines of every head of a layer: the heaviest, MInference's, and those of algorithm 5 as printed.

Where algorithm 5 of LoopServe (Li et al. 2025, appendix A.6) leaves points open, they are settled here as follows:

- *Sample*: query rows are drawn uniformly without replacement, from a seed. If there are fewer queries than the sample
  size, all are taken.
- *Lengths* are those of the matrix that is to be computed, as in the paper's equation 1; weights are those of the
  sample. The sample is a fixed share of all rows, so the ratio of the two orders lines in the same way.
- *Always kept*: the main diagonal and position 0, so that every query sees something; more with `begin`.
- *alpha = 1* is dense by definition, because a sample says nothing certain about rows outside it.
- One overlap for all lines of a kind, as printed. `w^max` is read as the largest sampled cell of a line, because two
  lines share at most one cell; `sum` then never exceeds what is recovered. Chosen lines are removed from their list. A
  gain below 0 counts as 0, a denominator below 1 as 1. If the lists are exhausted before `sum` reaches its target, the
  head is dense. This happens often, because overlaps are subtracted from every line, whether or not it crosses the
  chosen lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.files.records import Natural, PositiveShare, check_values
from sinkscope.sparse.attention import Scores, attention_of, line_sums, sample_queries, slash_sums
from sinkscope.sparse.bands import Lines, lengths_of

# MInference's numbers of lines, and how many of them are always the first columns and the nearest offsets.
VERTICAL, SLASH, EARLIEST, NEAREST = 1000, 6096, 30, 100


def near_lines(scores: Scores, first: int, local: int, dense_rows: int = 0) -> Lines:
    """Choose the first columns and the nearest offsets of every head, and the last rows."""
    index = torch.arange(scores.keys, device=scores.key.device).expand(scores.heads, -1)
    return Lines.of(index < first, index < local, scores.queries, dense_rows)


def top_lines(weights: Float[Tensor, "head kind key"], etas: Sequence[float], length: int | None = None) -> Lines:
    """Choose the heaviest `eta * 2 * length` lines of both kinds together, at least one, but none without weight.

    Args:
        weights: Weights of the lines over all queries.
        etas: Shares of lines; one choice is made for each.
        length: Length in the formula. None means the number of key positions.
    """
    both = weights.flatten(1)
    keys = weights.shape[2]
    most = [max(1, math.floor(eta * 2 * (length or keys) + 1e-9)) for eta in etas]
    chosen = heaviest(both, torch.tensor(most, device=both.device)[:, None, None], 0) & (both > 0)
    columns, offsets = chosen.split(keys, -1)
    return Lines.of(columns, offsets, keys)


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
) -> Lines:
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
    return Lines.of(columns, heaviest(offset_votes, slash, min(local, slash)), scores.queries)


def heaviest(
    weights: Float[Tensor, "head line"], count: int | Int[Tensor, "*choice _ 1"], always: int | Int[Tensor, "head 1"]
) -> Bool[Tensor, "*choice head line"]:
    """Choose the first `always` lines of each head, and the heaviest others, `count` together; for several counts."""
    index = torch.arange(weights.shape[1], device=weights.device).expand_as(weights)
    weights = weights.masked_fill(index < always, torch.inf)
    rank = weights.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return rank < count


@torch.no_grad()
def select_lines(scores: Scores, alpha: float = 0.955, *, sample: int = 48, seed: int = 0, begin: int = 1) -> Lines:
    """Run algorithm 5 as printed for all heads of a layer: vertical and slash lines that hold alpha of the attention.

    Args:
        scores: The scores of a layer without window, soft cap and learned sinks.
        alpha: Minimum share of the sampled attention weight that the lines hold.
        sample: Number of queries in the sample.
        seed: Seed of the sample.
        begin: Number of first positions that are always kept.

    Raises:
        SinkscopeError: alpha is outside (0, 1], or the sample is below 1.
    """
    check_values(PositiveShare, alpha=alpha)
    check_values(Natural, sample=sample)
    scores.check_plain()
    start = near_lines(scores, begin, 1)
    if alpha == 1:
        start.columns[:] = True
        return start
    rows = sample_queries(scores.queries, sample, seed)
    return faithful_lines(attention_of(scores, rows), (rows + scores.past).to(scores.key.device), alpha, start)


def faithful_lines(probs: Float[Tensor, "head row key"], at: Int[Tensor, " row"], alpha: float, lines: Lines) -> Lines:
    """Run algorithm 5: add lines to those of each head until they hold `alpha` of the sample; else it becomes dense.

    Numbers in comments are lines of the algorithm. `w` are weights of lines in the sample, `l` their lengths in the
    matrix, and `ol` the sums of the largest cells (`w_max`) of the lines chosen so far. `_s` stands for slash lines,
    `_v` for vertical ones.

    Args:
        probs: Attention of the sampled queries (lines 1 to 4).
        at: Positions of these queries.
        alpha: Share of the sampled weight.
        lines: Lines that are always chosen; they are changed in place.
    """
    offset = (at[:, None] - torch.arange(probs.shape[2], device=at.device)).clamp(min=0)  # the future has no weight
    largest_s = torch.zeros_like(probs[:, 0])
    largest_s.scatter_reduce_(1, offset.flatten().expand(len(probs), -1), probs.flatten(1), "amax")
    weight = torch.stack([probs.sum(1), slash_sums(probs, at)], 1)  # 5
    order = weight.masked_fill(lines.both, torch.inf).argsort(dim=2, descending=True, stable=True)  # 6
    w = pad(weight.gather(2, order), (0, 1), value=-torch.inf)  # a list that has ended offers nothing
    w_max = torch.stack([probs.amax(1), largest_s], 1).double().gather(2, order)
    ol = pad(w_max.cumsum(2), (1, 0))  # 8: after so many lines of the list
    length = pad(lengths_of(lines.grid, at.device).columns[order], (0, 1))
    totals = (probs * lines.rows(at)).sum((1, 2), dtype=torch.float64).tolist()
    targets = (alpha * probs.sum((1, 2), dtype=torch.float64)).tolist()
    for head, (total, target) in enumerate(zip(totals, targets, strict=True)):
        w_v, w_s = w[head].tolist()
        ol_v, ol_s = ol[head].tolist()
        l_v, l_s = length[head].tolist()
        v = int(lines.columns[head].sum())  # 7: numbers of chosen lines, and where the lists begin
        s = int(lines.offsets[head].sum())
        while total < target and min(v, s) < probs.shape[2]:  # 9
            dw_s = w_s[s] - ol_v[v]  # 10 and 11
            dw_v = w_v[v] - ol_s[s]
            if dw_s / max(1, l_s[s] - v) >= dw_v / max(1, l_v[v] - s):  # 12
                s += 1  # 13
                total += max(0.0, dw_s)  # 14
            else:
                v += 1  # 16
                total += max(0.0, dw_v)  # 17
        if total >= target:
            lines.columns[head, order[head, 0, :v]] = True
            lines.offsets[head, order[head, 1, :s]] = True
        else:  # the lists ended, or the attention is not a number
            lines.columns[head] = True
    return lines  # 18
