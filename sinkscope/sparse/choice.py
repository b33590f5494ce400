"""The choice of bands, and LoopServe's algorithm 5 as printed (Li et al. 2025, section 5.1).

Where algorithm 5 leaves points open, they are settled here as follows:

- *Sample*: query rows are drawn uniformly without replacement, from a seed (for bands, half of them where the text
  copies itself: `sample.py`). If there are fewer queries than the sample size, all are taken.
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
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkscope.files.records import Natural, PositiveShare, check_values
from sinkscope.sparse.attention import Scores, attention_of
from sinkscope.sparse.bands import Bands, BlockGrid, CopiedBlocks, StoredRows, choose_bands, lengths_of
from sinkscope.sparse.devices import triton_module
from sinkscope.sparse.faithful import faithful_lines
from sinkscope.sparse.head_lines import HeadLines, near_lines
from sinkscope.sparse.replay import Replayed
from sinkscope.sparse.sample import Copies, sample_queries

SOUGHT = 0.5
"""Share of a query's attention from which on it seeks a key."""


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
    copies: Copies | None = None,
) -> Bands:
    """Choose columns and bands that hold alpha of the attention, for all heads of a layer; nothing waits for a GPU.

    Args:
        scores: The scores of a layer without window, soft cap and learned sinks.
        alpha: Share of the sampled attention that columns and bands of each head hold. With 1 all heads are dense.
        sample: Number of queries in the sample.
        seed: Seed of the sample.
        begin: Number of first positions that are always kept.
        checked: Number of queries of each head that are checked for a single key (`kept_columns`).
        dense_rows: Number of queries at the end that see everything, with those of the same tile; they are not sampled.
        dense_above: Share of the causal cells above which a head is dense: it gets all bands.
        copies: Queries at which the text copies itself: half of the sample are drawn among them, and all heads see
            the blocks of keys that they need. None: all queries are drawn alike.

    Raises:
        SinkscopeError: alpha is outside (0, 1], or the sample is below 1.
        UnsupportedError: The layer has a window, a soft cap or learned sinks, or triton is not installed on a GPU.
    """
    check_values(PositiveShare, alpha=alpha)
    check_values(Natural, sample=sample)
    scores.check_plain()
    grid = BlockGrid(scores.queries, scores.keys)
    copied = None if copies is None else copies.blocks
    choice = BandChoice(alpha, begin, checked, dense_rows, dense_above, copied)
    return choice.made(scores, sampled_rows(grid, sample, seed, dense_rows, copies))


@dataclass(frozen=True, eq=False)
class BandChoice:
    """The choice of columns and bands from given rows, with the settings of `select_bands`."""

    alpha: float
    begin: int
    checked: int
    dense_rows: int
    dense_above: float
    copied: CopiedBlocks | None

    @torch.no_grad()
    def made(self, scores: Scores, rows: Int[Tensor, " row"]) -> Bands:
        """Choose from the attention of some queries, by their indices; everything, if there are none."""
        grid, device = BlockGrid(scores.queries, scores.keys), scores.key.device
        if self.alpha == 1 or not len(rows):
            columns = torch.zeros(scores.heads, grid.keys, dtype=torch.bool, device=device)
            bands = torch.ones(scores.heads, grid.blocks, dtype=torch.bool, device=device)
            return Bands(columns, bands, grid, self.dense_rows)
        module = triton_module(device, "triton_sums")
        rows_of = StoredRows if module is None else module.ComputedRows
        always = kept_columns(scores, grid.sparse_queries(self.dense_rows), self.begin, self.checked)
        sample = rows_of(scores, rows)
        return choose_bands(sample, self.alpha, always, self.dense_above, self.dense_rows, self.copied)

    def recorded(
        self, scores: Scores, given: tuple[Tensor, Tensor, Tensor], kind: type[Replayed] = Replayed
    ) -> Replayed:
        """Return the choice for all layers of a prompt, which is called with queries, keys and rows like these.

        It gives columns and bands, the share of the cells of each head, whether it is dense, and what the kernel reads.
        """
        module, grid, device = (
            triton_module(scores.key.device, "triton"),
            BlockGrid(scores.queries, scores.keys),
            scores.key.device,
        )
        sparse = grid.sparse_queries(self.dense_rows)
        lengths = [lengths_of(part, device) for part in (grid, BlockGrid(sparse, grid.past + sparse))]

        def work(query: Tensor, key: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
            assert lengths  # a recording reads their memory, so they last as long
            made = self.made(Scores(query, key, scores.scaling), rows)
            lists = () if module is None else module.lists_of(made)
            return made.columns, made.bands, made.attended(), made.dense, *lists

        return kind(work, given)


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
    kv_heads, group = len(scores.key), scores.heads // len(scores.key)
    sought = torch.zeros(scores.heads, scores.keys, device=scores.key.device)
    sought[:, :begin].fill_(1.0)
    if checked == 0:
        return sought > 0
    first = scores.key[:, : max(1, begin)].repeat_interleave(group, 0)  # "kv_head key d -> (kv_head group) key d"
    sinks = (scores.query[:, :queries] @ first.mT).float() * scores.scaling
    rows = sinks.logsumexp(2).topk(min(checked, queries), largest=False).indices
    own = scores.query.gather(1, rows[..., None].expand(-1, -1, scores.query.shape[2])).float() * scores.scaling
    by_group = own.reshape(kv_heads, -1, own.shape[2])
    last = rows.view(kv_heads, -1, 1) + scores.past
    found = sought.view(kv_heads, group, -1)
    position = torch.arange(scores.keys, device=rows.device)
    for kv_head in range(kv_heads):
        logits = by_group[kv_head] @ scores.key[kv_head].float().T
        weight, place = logits.masked_fill_(position > last[kv_head], -torch.inf).softmax(1).max(1)
        seeks = (weight >= SOUGHT).float()
        found[kv_head].scatter_add_(1, place.view(group, -1), seeks.view(group, -1))
    return sought > 0


def sampled_rows(
    grid: BlockGrid, sample: int, seed: int, dense_rows: int, copies: Copies | None = None
) -> Int[Tensor, " row"]:
    """Draw the queries from which columns and bands are chosen: none of those that see everything."""
    at = None if copies is None else copies.at
    return sample_queries(grid.sparse_queries(dense_rows), sample, seed, at)


@torch.no_grad()
def select_lines(scores: Scores, alpha: float = 0.955, *, sample: int = 48, seed: int = 0, begin: int = 1) -> HeadLines:
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
        start.vertical[:] = True
        return start
    rows = sample_queries(scores.queries, sample, seed)
    return faithful_lines(attention_of(scores, rows), (rows + scores.past).to(scores.key.device), alpha, start)
