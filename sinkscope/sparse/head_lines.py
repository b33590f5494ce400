"""Vertical and slash lines of every head of a layer: the heaviest, MInference's, and those of algorithm 5 as printed.

Where algorithm 5 of LoopServe (Li et al. 2025, appendix A.6) leaves points open, they are settled here as follows:

- *Sample*: query rows are drawn uniformly without replacement, from a seed. If there are fewer queries than the sample
  size, all are taken.
- *Lengths* are those of the matrix that is to be computed, as in the paper's equation 1; weights are those of the
  sample. The sample is a fixed share of all rows, so the ratio of the two orders lines in the same way.
- *Always chosen*: the main diagonal, so that every query sees something.
- One overlap for all lines of a kind, as printed. `w^max` is read as the largest sampled cell of a line, because two
  lines share at most one cell; `sum` then never exceeds what is recovered. Chosen lines are removed from their list. A
  gain below 0 counts as 0, a denominator below 1 as 1. If the lists are exhausted before `sum` reaches its target, the
  head is dense. This happens often, because overlaps are subtracted from every line, whether or not it crosses the
  chosen lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.files.records import Natural, PositiveShare, check_values
from sinkscope.sparse.attention import ROWS, Scores, attention_of, line_sums, sample_queries, slash_sums
from sinkscope.sparse.bands import Lines

# MInference's numbers of lines, and how many of them are always the first columns and the nearest offsets.
VERTICAL, SLASH, EARLIEST, NEAREST = 1000, 6096, 30, 100

SMALLEST_DIFFERENCE = 1e-4  # of the attention of one query; sums in float32 are less exact than a hundredth of it


def top_lines(
    scores: Scores,
    weights: Float[Tensor, "head kind key"],
    etas: Sequence[float],
    *,
    since: int = 0,
    weighs_whole: bool = False,
) -> Bool[Tensor, "eta head kind key"]:
    """Choose the heaviest `eta * 2 * queries` lines of both kinds together, one after the other, at least one.

    A line weighs what it holds beyond lines of the other kind that were chosen before it. Weights are compared to a
    ten-thousandth of the attention of one query, and a line with less is not chosen: of lines of equal weight columns
    come first, from the first one on, and then the nearest offsets. Memory grows linearly with the length.

    Args:
        scores: The scores of a layer.
        weights: What `line_sums` returns for them: the weights of the lines over all queries.
        etas: Shares of lines; one choice is made for each.
        since: The argument of `line_sums`.
        weighs_whole: Whether a line weighs all that it holds, also where a chosen line of the other kind holds it.
    """
    most = [max(1, math.floor(eta * 2 * scores.queries + 1e-9)) for eta in etas]
    held = weights.flatten(1).double()
    index = torch.arange(held.shape[1], device=held.device)
    turn = torch.full_like(held, held.shape[1], dtype=torch.long)  # of lines that are never chosen
    along = None if weighs_whole else LineCells(scores, since)
    for number in range(min(max(most), held.shape[1])):
        units = (held / SMALLEST_DIFFERENCE).round().long()
        order = (units * len(index) - index).masked_fill(turn < number, -len(index))  # equal ones by index
        line = order.argmax(1, keepdim=True)
        has_weight = (order.gather(1, line) > -len(index)) & (units.gather(1, line) > 0)
        if not has_weight.any():
            break
        turn.scatter_(1, line, torch.where(has_weight, number, turn.gather(1, line)))
        if along is not None:
            cells, crossing = along.cells(line)
            held.scatter_add_(1, crossing, -cells.double() * has_weight)
    chosen = turn < torch.tensor(most, device=held.device)[:, None, None]
    return chosen.unflatten(-1, (2, -1))


class LineCells:
    """The attention on single lines, computed from queries and keys.

    Args:
        scores: The scores of a layer.
        since: Keys before this one take part in the softmax only; lines count keys from it.
    """

    def __init__(self, scores: Scores, since: int) -> None:
        self.scores = scores
        self.since = since
        device = scores.query.device
        self.query = scores.query.float()
        self.key = scores.key.float()
        self.group = torch.arange(scores.heads, device=device)[:, None] // (scores.heads // len(scores.key))
        self.at = torch.arange(scores.past, scores.keys, device=device)
        shares: list[Tensor] = []
        places: list[Tensor] = []
        for rows in torch.arange(scores.queries).split(ROWS):
            share, place = attention_of(scores, rows).max(-1)
            shares.append(share)
            places.append(place)
        self.most = torch.cat(shares, 1)  # of the attention of each query; all cells are computed beside its largest
        self.largest = self.logits(torch.cat(places, 1))

    def logits(self, place: Int[Tensor, "head query"]) -> Float[Tensor, "head query"]:
        """Return the score of one key for each query."""
        scores = (self.query * self.key[self.group, place]).sum(-1) * self.scores.scaling
        if self.scores.softcap is not None:
            scores = torch.tanh(scores / self.scores.softcap) * self.scores.softcap
        return scores

    def cells(self, line: Int[Tensor, "head 1"]) -> tuple[Float[Tensor, "head query"], Int[Tensor, "head query"]]:
        """Return the attention of each query on one line of each head, and the line of the other kind that crosses it.

        Args:
            line: Columns, counted from `since`, and after all of them the offsets.
        """
        keys = self.scores.keys - self.since
        is_column = line < keys
        place = torch.where(is_column, line + self.since, self.at - (line - keys))
        offset = self.at - place
        visible = (place >= self.since) & (offset >= 0) & (offset < (self.scores.window or self.scores.keys))
        share = self.most * (self.logits(place.clamp(min=0)) - self.largest).exp()
        crossing = torch.where(is_column, offset + keys, place - self.since)
        return share * visible, crossing.where(visible, 0)


def heaviest(
    weights: Float[Tensor, "head line"],
    count: Int[Tensor, "*choice _ 1"],
    always: int | Int[Tensor, "*choice _ 1"],
) -> Bool[Tensor, "*choice head line"]:
    """Choose the first `always` lines of each head, and the heaviest others, `count` together; for several counts."""
    index = torch.arange(weights.shape[1], device=weights.device)
    weights = weights.masked_fill(index < always, torch.inf)
    return weights.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) < count


@torch.no_grad()
def minference_lines(
    scores: Scores, vertical: int = VERTICAL, slash: int = SLASH, *, last: int = 64, share: float | Tensor | None = None
) -> Lines:
    """Choose fixed numbers of lines by the votes of the last queries: MInference's pattern (Jiang et al. 2024).

    In its proportion the first positions and the nearest offsets are always among them: 30 of 1,000 vertical lines and
    100 of 6,096 slash lines, of these at least one. The authors' kernel computes whole blocks around the slash lines;
    here only the lines themselves are kept.

    Args:
        scores: The scores of a layer.
        vertical: Number of vertical lines to keep.
        slash: Number of slash lines to keep.
        last: Number of last queries that vote.
        share: Share of the causal cells, of all heads or "*choice head", that takes the place of the numbers: each head
            gets as many lines in the usual proportion as do not exceed it, and at least one of each kind.

    Raises:
        SinkscopeError: A number is below 1.
    """
    check_values(Natural, vertical=vertical, slash=slash, last=last)
    column_votes, offset_votes = line_sums(scores.part(max(scores.past, scores.keys - last), scores.keys)).unbind(1)

    def lines(vertical: Tensor, slash: Tensor) -> Lines:
        columns = heaviest(column_votes, vertical.clamp(min=1), vertical * EARLIEST // VERTICAL)
        offsets = heaviest(offset_votes, slash, (slash * NEAREST // SLASH).clamp(min=1))
        return Lines.of(columns, offsets, scores.queries)

    if share is None:
        return lines(torch.tensor([[vertical]]), torch.tensor([[slash]]))
    fits = torch.ones(scores.heads, 1, dtype=torch.long, device=column_votes.device)
    too_many = fits + scores.keys  # all slash lines and one
    limit = share * lines(fits, fits).grid.cells
    while bool((too_many - fits > 1).any()):
        middle = (fits + too_many) // 2
        within = (lines(middle * VERTICAL // SLASH, middle).cells() <= limit)[..., None]
        fits = torch.where(within, middle, fits)
        too_many = torch.where(within, too_many, middle)
    return lines(fits * VERTICAL // SLASH, fits)


@torch.no_grad()
def select_lines(scores: Scores, alpha: float = 0.955, *, sample: int = 48, seed: int = 0) -> Lines:
    """Run algorithm 5 as printed for all heads of a layer: vertical and slash lines that hold alpha of the attention.

    Args:
        scores: The scores of a layer without window, soft cap and learned sinks.
        alpha: Minimum share of the sampled attention weight that the lines hold.
        sample: Number of queries in the sample.
        seed: Seed of the sample.

    Raises:
        SinkscopeError: alpha is outside (0, 1], or the sample is below 1.
    """
    check_values(PositiveShare, alpha=alpha)
    scores.check_plain()
    rows = sample_queries(scores.queries, sample, seed)  # 1
    probs = attention_of(scores, rows)  # 2 to 4
    at = (rows + scores.past).to(probs.device)
    chosen = torch.stack([faithful_lines(of_head, at, scores.queries, alpha) for of_head in probs.split(1)])
    return Lines.of(chosen[:, 1], chosen[:, 0], scores.queries)


def faithful_lines(
    probs: Float[Tensor, "1 row key"], at: Int[Tensor, " row"], queries: int, alpha: float
) -> Bool[Tensor, "2 key"]:
    """Run algorithm 5 for one head; if it finds no lines that hold `alpha` of the sample, all are chosen.

    Numbers in comments are lines of the algorithm. `w` are weights of lines in the sample, `l` their lengths in the
    matrix, and `ol` the sums of the largest cells (`w_max`) of the lines chosen so far. `_s` stands for slash lines,
    `_v` for vertical ones.

    Args:
        probs: Attention of the sampled queries (lines 1 to 4).
        at: Positions of these queries.
        queries: Number of all queries.
        alpha: Share of the sampled weight.

    Returns:
        Which slash lines are chosen, and which vertical ones.
    """
    lists = SortedLines.of(probs, at, queries)
    total = float(probs[0, torch.arange(len(at)), at].sum(dtype=torch.float64))
    target = alpha * float(probs.sum(dtype=torch.float64))
    s, v, total = lists.chosen(total, target)
    chosen = torch.full_like(lists.order, not total >= target, dtype=torch.bool)  # of what is not a number, too
    chosen[0, lists.order[0, :s]] = True
    chosen[1, lists.order[1, :v]] = True
    return chosen  # 18


@dataclass(frozen=True, eq=False)
class SortedLines:
    """The slash lines and the vertical lines of one head, each list by weight, the heaviest first.

    Names are those of algorithm 5 (see `faithful_lines`).

    Attributes:
        order: Numbers of the lines of both lists.
        w_s: Weights of slash lines; of the main diagonal infinite, so that it stands first.
        w_v: Weights of vertical lines.
        l_s: Lengths of slash lines.
        l_v: Lengths of vertical lines.
        w_max_s: The largest cell of each slash line.
        w_max_v: The largest cell of each vertical line.
    """

    order: Int[Tensor, "2 key"]
    w_s: list[float]
    w_v: list[float]
    l_s: list[int]
    l_v: list[int]
    w_max_s: list[float]
    w_max_v: list[float]

    @classmethod
    def of(cls, probs: Float[Tensor, "1 row key"], at: Int[Tensor, " row"], queries: int) -> SortedLines:
        """Sort the lines of sampled queries (lines 5 and 6)."""
        keys = probs.shape[2]
        offset = (at[:, None] - torch.arange(keys, device=at.device)).clamp(min=0)  # the future has no weight
        largest = torch.zeros_like(probs[:, 0]).scatter_reduce_(1, offset.view(1, -1), probs.flatten(1), "amax")
        weight = torch.cat([slash_sums(probs, at), probs.sum(1)])  # 5
        weight[0, 0] = torch.inf
        order = weight.argsort(dim=1, descending=True, stable=True)  # 6
        weights = pad(weight.gather(1, order), (0, 1), value=-torch.inf)  # a list that has ended offers nothing
        lengths = pad((keys - order).clamp(max=queries), (0, 1))
        cells = torch.cat([largest, probs.amax(1)]).gather(1, order)
        return cls(order, *weights.tolist(), *lengths.tolist(), *cells.tolist())

    def chosen(self, total: float, target: float) -> tuple[int, int, float]:
        """Return how many slash and vertical lines are chosen, and what they hold (lines 7 to 17).

        Args:
            total: What the main diagonal holds.
            target: What they should hold.
        """
        s, v = 1, 0  # 7: numbers of chosen lines, with which the lists begin
        ol_s, ol_v = self.w_max_s[0], 0.0  # 8
        while total < target and s + v < 2 * self.order.shape[1]:  # 9
            dw_s = self.w_s[s] - ol_v  # 10 and 11
            dw_v = self.w_v[v] - ol_s
            if dw_s / max(1, self.l_s[s] - v) >= dw_v / max(1, self.l_v[v] - s):  # 12
                ol_s += self.w_max_s[s]  # 13
                total += max(0.0, dw_s)  # 14
                s += 1
            else:
                ol_v += self.w_max_v[v]  # 16
                total += max(0.0, dw_v)  # 17
                v += 1
        return s, v, total
