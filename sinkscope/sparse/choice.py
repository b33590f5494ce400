"""The choice of columns and bands for each head, by a threshold on their density.

For each head, from the attention of a few sampled queries:

1. A line's density is its weight in the sample divided by the number of cells that it has in the matrix.
2. The highest threshold is searched for which the lines that reach it hold `alpha` of the sample's weight.
3. Densities are taken again without the cells on chosen lines of the other kind, and the threshold is searched again.

The second search is needed: without it the chosen lines held as much attention of the queries that were not sampled
(0.994 in SmolLM2 with alpha 0.995), but the loss of a text rose by 0.018 nats instead of -0.002.

Cells on lines of both kinds count once throughout. Nothing depends on an order of additions that varies, and no step
needs to know on the host what an earlier one found.

Sampled queries are drawn uniformly without replacement, from a seed. If
there are fewer queries than the sample size, all are taken. With alpha = 1 everything is chosen, because a sample says
nothing certain about rows outside it.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.files.records import PositiveShare, check_values
from sinkscope.models.arithmetic import product
from sinkscope.sparse.attention import Scores, attention_of, sample_queries
from sinkscope.sparse.bands import NEAR, BlockGrid, ByBand, Lines, crossed, lengths_of
from sinkscope.sparse.sparse import triton_module

SOUGHT = 0.5
"""Share of a query's attention from which on it seeks a key."""
ByColumn = Float[Tensor, "head key"]
ByThreshold = Float[Tensor, "head threshold"]
_BELOW = 12  # octaves below the density of even attention: what lies on lines below that is left out
_FINE = 0.06  # octaves between the threshold and one that is too high


@torch.no_grad()
def select_bands(
    scores: Scores,
    alpha: float = 0.98,
    *,
    sample: int = 64,
    seed: int = 0,
    begin: int = 4,
    checked: int = 0,
    dense_rows: int = 0,
    dense_above: float = math.inf,
) -> Lines:
    """Choose columns and bands that hold alpha of the attention, for all heads of a layer; nothing waits for a GPU.

    Args:
        scores: The scores of a layer without window, soft cap and learned sinks.
        alpha: Share of the sampled attention that columns and bands of each head hold. With 1 all heads are dense.
        sample: Number of queries in the sample; if there are none to sample, all heads are dense.
        seed: Seed of the sample.
        begin: Number of first positions that are always kept.
        checked: Number of queries of each head that are checked for a single key (`kept_columns`).
        dense_rows: Number of queries at the end that see everything, with those of the same tile; they are not sampled.
        dense_above: Share of the causal cells above which a head is dense: it gets all bands.

    Raises:
        SinkscopeError: alpha is outside (0, 1], or the sample is below 1.
        UnsupportedError: The layer has a window, a soft cap or learned sinks, or triton is not installed on a GPU.
    """
    check_values(PositiveShare, alpha=alpha)
    scores.check_plain()
    grid = BlockGrid(scores.queries, scores.keys)
    device = scores.key.device
    columns = torch.zeros(scores.heads, grid.keys, dtype=torch.bool, device=device)
    bands = torch.zeros(scores.heads, grid.blocks, dtype=torch.bool, device=device)
    rows = sample_queries(grid.sparse_queries(dense_rows), sample, seed)  # none of those that see everything
    if alpha == 1 or not len(rows):
        return Lines(columns, ~bands, grid, dense_rows)
    module = triton_module(device, "triton_sums")  # on a GPU attention is computed anew for each sum
    sampled = (StoredRows if module is None else module.ComputedRows)(scores, rows)
    always = kept_columns(scores, grid.sparse_queries(dense_rows), begin, checked)
    otherwise = ~bands  # attention that is not a number: such heads are dense, as without a choice
    for _ in range(2):
        of_columns, of_bands = densities(sampled, Lines(columns, bands, grid), always)
        least, enough = _threshold(sampled, of_columns, of_bands, alpha)
        # Where lines of both kinds cover everything, none has weight outside the other kind: the first choice stays.
        columns = torch.where(enough, of_columns >= least, columns)
        bands = otherwise = torch.where(enough, of_bands >= least, otherwise)
    dense = (Lines(columns, bands, grid).cells() > dense_above * grid.cells)[:, None]
    return Lines(columns & ~dense, bands | dense, grid, dense_rows)


def kept_columns(scores: Scores, queries: int, begin: int, checked: int) -> Bool[Tensor, "head key"]:
    """Find the columns that are always chosen: the first ones, and keys that single queries seek.

    A share of the sum over all rows does not see what single rows lose.

    Queries that seek nothing attend to the first tokens, which are attention sinks. So the queries that score these
    lowest are checked, and a key that holds half of the attention of one is found.

    Args:
        scores: The scores of a layer.
        queries: Number of queries, from the first on, that are looked at.
        begin: Number of first tokens.
        checked: Number of queries of each head that are checked.
    """
    group = scores.heads // len(scores.key)
    sought = torch.zeros(scores.heads, scores.keys, device=scores.key.device)
    sought[:, :begin].fill_(1.0)
    position = torch.arange(scores.keys, device=scores.key.device)
    for key, query, thresholds in zip(scores.key, scores.query.split(group), sought.split(group), strict=True):
        if checked:
            sinks = product(query[:, :queries], key[: max(1, begin)].mT).float() * scores.scaling
            rows = sinks.logsumexp(2).topk(min(checked, queries), largest=False).indices[..., None]
            asked = query.gather(1, rows.expand(-1, -1, key.shape[1])).float() * scores.scaling
            logits = product(asked, key.float().mT).masked_fill_(position > rows + scores.past, -torch.inf)
            weight, place = logits.softmax(2).max(2)
            thresholds.scatter_add_(1, place, (weight >= SOUGHT).float())
    return sought > 0


class StoredRows:
    """Attention of some queries, in memory, of which only sums are asked.

    Attributes:
        grid: Blocks of the layer.
        rows: Number of these queries.
        thresholds: Number of thresholds that are tried at a time.

    Args:
        scores: The scores of a layer.
        rows: Indices of the queries.
    """

    thresholds = 512

    def __init__(self, scores: Scores, rows: Int[Tensor, " row"]) -> None:
        self.rows = len(rows)
        self.grid = grid = BlockGrid(scores.queries, scores.keys)
        blocked = grid.blocked(attention_of(scores, rows))
        # Block by block, because all sums are products within blocks.
        self._probs = rearrange(blocked, "head row block own -> head block row own").contiguous()
        last = grid.last_block(rows.to(scores.key.device) + scores.past)
        back = last - torch.arange(grid.blocks, device=last.device)[:, None]
        self._back: Int[Tensor, "block row"] = back.clamp(min=0)  # blocks after a row have no weight

    def sums(self, chosen: Lines) -> tuple[ByColumn, ByBand]:
        """Weight of each column outside the chosen bands, and of each band outside the chosen columns."""
        outside = (~chosen.offsets).float()[:, self._back]
        by_column = product(outside[:, :, None], self._probs).flatten(1)
        not_chosen = self.grid.blocked((~chosen.columns).float())
        by_block = product(self._probs, not_chosen[..., None]).flatten(1)
        by_band = torch.zeros_like(outside[:, :, 0])
        by_band.scatter_add_(1, self._back.flatten().expand(len(by_band), -1), by_block)
        return by_column[:, self.grid.lead : self.grid.lead + self.grid.keys], by_band

    def held(self, columns: ByColumn, bands: ByBand, least: ByThreshold) -> ByThreshold:
        """Weight on the lines whose densities reach each of the ascending thresholds; every cell counts once."""
        # A cell reaches as many of the ascending thresholds as the denser one of its lines: one sum over cells for all.
        by_column = self.grid.blocked(torch.searchsorted(least, columns, right=True).short())
        by_band = torch.searchsorted(least, bands, right=True).short()[:, self._back]
        held = torch.empty_like(least)
        for head, probs in enumerate(self._probs):
            reached = torch.maximum(by_column[head, :, None], by_band[head, ..., None])
            # In float64, because one sum after the other loses more in float32 than sums of products do.
            weight = torch.bincount(reached.flatten(), probs.flatten().double(), least.shape[1] + 1)
            held[head] = weight.flip(0).cumsum(0).flip(0)[1:]
        return held


def densities(sample: StoredRows, chosen: Lines, always: Bool[Tensor, "head key"]) -> tuple[ByColumn, ByBand]:
    """Return the weight per cell of each line outside the chosen lines of the other kind; infinite for what stays.

    Args:
        sample: The sampled attention.
        chosen: The lines that were chosen before; at first none.
        always: Columns that are chosen whatever they weigh.
    """
    grid = sample.grid
    columns, _, bands = lengths_of(grid, always.device)
    column_weight, band_weight = sample.sums(chosen)
    column_left = columns - grid.by_key(crossed(grid, chosen.offsets.float()))
    band_left = bands - crossed(grid, grid.blocked(chosen.columns.float()).sum(2))
    of_columns = column_weight / column_left.clamp(min=1)
    of_bands = band_weight / band_left.clamp(min=1)
    of_columns.masked_fill_(always, torch.inf)
    of_bands[:, :NEAR].fill_(torch.inf)
    return of_columns, of_bands


def _threshold(
    sample: StoredRows, columns: ByColumn, bands: ByBand, alpha: float
) -> tuple[Float[Tensor, "head 1"], Bool[Tensor, "head 1"]]:
    """The highest density, to 4 %, from which on lines hold `alpha` of the sample; and whether one does."""
    least = math.log2(sample.rows / sample.grid.cells) - _BELOW
    step = math.log2(sample.rows / sample.grid.queries) - least  # a mean density is highest with a cell in each row
    low = torch.full_like(columns[:, :1], least)
    number = torch.arange(sample.thresholds, device=columns.device)
    enough = torch.zeros_like(low, dtype=torch.bool)
    while step > _FINE:
        step /= sample.thresholds
        tried = low + step * number
        enough = sample.held(columns, bands, tried.exp2()) >= alpha * sample.rows
        low = tried.gather(1, enough[:, 1:].sum(1, keepdim=True))
    return low.exp2(), enough[:, :1]
