"""Columns and bands of attention: which ones each head needs, by one threshold for its density.

A *column* is a key position, a vertical line (Li et al. 2025, LoopServe, section 3.1). A *band* is what slash lines
become if attention is computed in blocks of 64 queries and 64 keys: band b is all blocks whose keys lie b blocks before
their queries. Band 0 is the diagonal.

The choice, for each head, from the attention of a few sampled queries:

1. A line's density is its weight in the sample divided by the number of cells that it has in the matrix.
2. The highest threshold is searched for which the lines that reach it hold `alpha` of the sample's weight.
3. Densities are taken again, of each kind outside the lines of the other kind, and the threshold is searched again.

The second search is needed: without it, lines outside of those that are always chosen held as much of the attention of
other queries (0.994 of SmolLM2's with alpha 0.995), but a text's loss rose by 0.018 nats and not by -0.002.

Cells on lines of both kinds count once throughout. Nothing depends on an order of additions that varies, and no step
needs to know on the host what an earlier one found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakValueDictionary

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.sparse.attention import Scores, attention_of

TILE = 64
"""Queries in a block."""
BAND = 16
"""Keys in a block, which divide the queries."""
PER = TILE // BAND
"""Bands that lie in the diagonal block."""
NEAR = 2 * PER
"""Bands that are always chosen: each query sees the 64 keys before it."""
ByColumn = Float[Tensor, "head key"]
ByBand = Float[Tensor, "head block"]
ByThreshold = Float[Tensor, "head threshold"]
_BELOW = 12  # octaves below the density of even attention: what lies on lines below that is left out
_FINE = 0.06  # octaves between the threshold and one that is too high


@dataclass(frozen=True)
class BlockGrid:
    """Tiles of 64 queries, and blocks of 16 keys, which begin where tiles do.

    The last key of a tile is in its band 0, and band b of all tiles are the blocks b blocks before.

    Attributes:
        queries: Number of queries, which are the last of the positions.
        keys: Number of keys.
    """

    queries: int
    keys: int

    @property
    def past(self) -> int:
        """Number of positions before the first query."""
        return self.keys - self.queries

    @property
    def before(self) -> int:
        """Number of blocks of keys before the first query."""
        return -(-self.past // BAND)

    @property
    def lead(self) -> int:
        """Number of keys that the first of these blocks lacks."""
        return BAND * self.before - self.past

    @property
    def tiles(self) -> int:
        """Number of blocks of queries."""
        return -(-self.queries // TILE)

    @property
    def short(self) -> int:
        """Number of queries that the last tile lacks."""
        return -self.queries % TILE

    @property
    def cells(self) -> int:
        """Number of causal cells: each query sees one key more than the one before."""
        return self.queries * (2 * self.keys - self.queries + 1) // 2

    def sparse_queries(self, dense_rows: int) -> int:
        """Number of queries before those that see everything: `dense_rows` at the end, and those of the same tile."""
        if not dense_rows:
            return self.queries
        return max(0, self.queries - dense_rows) // TILE * TILE

    @property
    def blocks(self) -> int:
        """Number of blocks of keys, and of bands."""
        return self.before + PER * self.tiles

    def last_block(self, at: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
        """Return the last block of keys of the tile of the query at a position; its band 0."""
        return self.before + (at - self.past) // TILE * PER + PER - 1

    def blocked(self, by_key: Tensor) -> Tensor:
        """Split the last dimension, of keys, into blocks, of which the first and the last are filled with zeros."""
        return rearrange(pad(by_key, (self.lead, self.short)), "... (block own) -> ... block own", own=BAND)

    def by_key(self, by_block: Tensor) -> Tensor:
        """Repeat the last dimension, of blocks, for the keys of each block."""
        every = repeat(by_block, "... block -> ... (block own)", own=BAND)
        return every[..., self.lead : self.lead + self.keys]


@dataclass(frozen=True, eq=False)
class Lengths:
    """How long the lines of a grid are, on a device.

    Attributes:
        columns: Number of causal cells of each column.
        own: Number of these in the tile of its own.
        bands: Number of causal cells of each band.
    """

    columns: Int[Tensor, " key"]
    own: Int[Tensor, " key"]
    bands: Int[Tensor, " block"]


_LENGTHS: WeakValueDictionary[tuple[BlockGrid, torch.device], Lengths] = WeakValueDictionary()


@lru_cache(4)  # the layers of a prompt are of one grid
def lengths_of(grid: BlockGrid, device: torch.device) -> Lengths:
    """Return the lengths of a grid's lines, the same object as long as anybody holds it."""
    known = _LENGTHS.get((grid, device))
    if known is not None:
        return known
    position = torch.arange(grid.keys)
    to_end = torch.minimum(TILE - (position - grid.past) % TILE, grid.keys - position)
    own = torch.where(position >= grid.past, to_end, 0)
    near = grid.blocked(own)[grid.before :].sum(1).view(-1, PER).sum(0).flip(0)
    far = crossed(grid, grid.blocked(torch.ones(1, grid.keys, dtype=torch.double)).sum(2))[0].long()
    columns = torch.arange(grid.keys, 0, -1).clamp(max=grid.queries)
    lengths = Lengths(columns.to(device), own.to(device), torch.cat([near, far[PER:]]).to(device))
    _LENGTHS[grid, device] = lengths
    return lengths


def crossed(grid: BlockGrid, counts: ByBand) -> ByBand:
    """Count the cells of a line that lines of the other kind cross, if the latter are of bands from `PER` on.

    Args:
        grid: The tiles.
        counts: Bands, each counted as 1, or the number of columns in each block.

    Returns:
        For a column of each block, or for each band.
    """
    # Every PER-th of them meets the same line. The sums are along the last dimension, which is faster on a GPU.
    steps = pad(counts, (0, -grid.blocks % PER)).unflatten(1, (-1, PER)).mT.cumsum(2)
    so_far = steps.mT.flatten(1)[:, : grid.blocks]
    met = so_far.flip(1)
    met[:, : grid.before] -= so_far[:, : grid.before].flip(1)
    return TILE * met - grid.short * counts.flip(1)


@dataclass(frozen=True, eq=False)
class CopiedBlocks:
    """Single blocks of keys that all heads see, because the text copies itself there (`copies.py`).

    Attributes:
        tile: The tile of queries that sees it, ascending.
        block: The block of keys; none of its keys comes after a query of the tile.
        start: Number of pieces in the tiles before each tile, and in all tiles.
    """

    tile: Int[Tensor, " piece"]
    block: Int[Tensor, " piece"]
    start: Int[Tensor, " more_than_tiles"]

    @classmethod
    def of(cls, tile: Int[Tensor, " pair"], block: Int[Tensor, " pair"], grid: BlockGrid) -> CopiedBlocks:
        """Return these pairs of tiles and blocks, each once."""
        pieces = (tile * grid.blocks + block).unique()
        tile = pieces // grid.blocks
        start = torch.searchsorted(tile, torch.arange(grid.tiles + 1, device=tile.device))
        return cls(tile, pieces % grid.blocks, start)

    def to(self, device: torch.device) -> CopiedBlocks:
        """Return the same on a device."""
        return CopiedBlocks(self.tile.to(device), self.block.to(device), self.start.to(device))

    def rows(self, tiles: Int[Tensor, " row"], grid: BlockGrid) -> Bool[Tensor, "row block"]:
        """Return which blocks the queries of these tiles see."""
        own = (tiles[:, None] == self.tile).int()
        return own.new_zeros(len(tiles), grid.blocks).scatter_add_(1, self.block.expand_as(own), own) > 0


@dataclass(frozen=True, eq=False)
class Bands:
    """The columns and bands chosen for every head of a layer in one sequence.

    Attributes:
        columns: Whether each key position is chosen.
        bands: Whether each band is chosen. All heads have the first `PER` bands; a dense head has all.
        grid: The tiles.
        dense_rows: So many queries at the end see everything, as do those of the same tile.
        copied: Single blocks that all heads see besides.
    """

    columns: Bool[Tensor, "head key"]
    bands: Bool[Tensor, "head block"]
    grid: BlockGrid
    dense_rows: int = 0
    copied: CopiedBlocks | None = None

    @property
    def dense(self) -> Bool[Tensor, " head"]:
        """Which heads have all bands."""
        return self.bands.all(1)

    @property
    def sparse_tiles(self) -> int:
        """Number of tiles before those that see everything."""
        return -(-self.grid.sparse_queries(self.dense_rows) // TILE)

    def attended(self) -> Float[Tensor, " head"]:
        """Return the share of the causal cells that is computed, with the dense rows."""
        grid, sparse = self.grid, self.grid.sparse_queries(self.dense_rows)
        if not sparse:
            return torch.ones(len(self.bands), device=self.bands.device)
        before = BlockGrid(sparse, grid.past + sparse)
        part = Bands(self.columns[:, : before.keys], self.bands[:, : before.blocks], before, copied=self.copied)
        on_lines = part.cells()
        return (on_lines + grid.cells - before.cells) / grid.cells

    def cells(self) -> Float[Tensor, " head"]:
        """Return the number of cells on columns and bands, each counted once, without what dense rows see besides."""
        lengths = lengths_of(self.grid, self.columns.device)
        far = self.bands.float()
        far[:, :PER].zero_()
        left = lengths.columns - lengths.own - self.grid.by_key(crossed(self.grid, far))
        on_lines = (self.bands * lengths.bands).sum(1) + (self.columns * left).sum(1)
        if self.copied is None:
            return on_lines
        grid, copied = self.grid, self.copied
        inside = copied.tile < grid.tiles
        back = grid.before + copied.tile * PER + PER - 1 - copied.block
        alone = inside & ~self.bands[:, back * inside]
        others = grid.blocked((~self.columns).float()).sum(2)[:, copied.block * inside]
        queries = (grid.queries - copied.tile * TILE).clamp(max=TILE)
        return on_lines + (alone * others * queries).sum(1)

    def rows(self, at: Int[Tensor, " row"]) -> Bool[Tensor, "head row key"]:
        """Return which keys the queries at these positions see."""
        grid = self.grid
        back = grid.last_block(at)[:, None] - torch.arange(grid.blocks, device=at.device)
        tile = (at - grid.past) // TILE
        more = (tile >= self.sparse_tiles)[:, None]
        if self.copied is not None:
            more = more | self.copied.rows(tile, grid)
        in_band = grid.by_key(self.bands[:, back.clamp(min=0)] | more)
        return (self.columns[:, None] | in_band) & (at[:, None] >= torch.arange(grid.keys, device=at.device))


class StoredRows:
    """Attention of some queries, in memory, of which only sums are asked.

    Attributes:
        scores: The scores of the layer.
        grid: Its blocks.
        rows: Number of these queries.
        thresholds: Number of thresholds that are tried at a time.

    Args:
        scores: The scores of a layer.
        rows: Indices of the queries.
    """

    thresholds = 512

    def __init__(self, scores: Scores, rows: Int[Tensor, " row"]) -> None:
        self.scores, self.rows = scores, len(rows)
        self.grid = grid = BlockGrid(scores.queries, scores.keys)
        blocked = grid.blocked(attention_of(scores, rows))
        # Block by block, because all sums are products within blocks.
        self._probs = rearrange(blocked, "head row block own -> head block row own").contiguous()
        last = grid.last_block(rows.to(scores.key.device) + scores.past)
        back = last - torch.arange(grid.blocks, device=last.device)[:, None]
        self._back: Int[Tensor, "block row"] = back.clamp(min=0)  # blocks after a row have no weight

    def sums(self, chosen: Bands) -> tuple[ByColumn, ByBand]:
        """Weight of each column outside the chosen bands, and of each band outside the chosen columns."""
        outside = (~chosen.bands).float()[:, self._back]
        by_column = (outside[:, :, None] @ self._probs).flatten(1)
        left = self.grid.blocked((~chosen.columns).float())
        by_block = (self._probs @ left[..., None]).flatten(1)
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


def choose_bands(
    sample: StoredRows,
    alpha: float,
    always: Bool[Tensor, "head key"],
    dense_above: float,
    dense_rows: int,
    copied: CopiedBlocks | None = None,
) -> Bands:
    """Choose columns and bands that hold `alpha` of the sample; all bands where these fill more than `dense_above`.

    Args:
        sample: The sampled attention.
        alpha: Share of the sampled weight.
        always: Columns that are chosen whatever they weigh.
        dense_above: Share of the causal cells above which a head is dense.
        dense_rows: Number of queries at the end that see everything.
        copied: Single blocks that all heads see besides; the search does not count on them.
    """
    grid, heads, device = sample.grid, sample.scores.heads, sample.scores.key.device
    columns = torch.zeros(heads, grid.keys, dtype=torch.bool, device=device)
    bands = torch.zeros(heads, grid.blocks, dtype=torch.bool, device=device)
    lengths = lengths_of(grid, device)
    for number in range(2):
        column_weight, band_weight = sample.sums(Bands(columns, bands, grid))
        column_left, band_left = lengths.columns, lengths.bands
        if number:  # at first no line is crossed
            column_left = column_left - grid.by_key(crossed(grid, bands.float()))
            band_left = band_left - crossed(grid, grid.blocked(columns.float()).sum(2))
        of_columns, of_bands = column_weight / column_left.clamp(min=1), band_weight / band_left.clamp(min=1)
        of_columns.masked_fill_(always, torch.inf)
        of_bands[:, :NEAR].fill_(torch.inf)
        least, enough = _threshold(sample, of_columns, of_bands, alpha)
        # Where lines of both kinds cover everything, none has weight outside the other kind: the first choice stays. At
        # first only attention that is not a number is not enough: such heads are dense, as without a choice.
        if not number:
            bands = torch.ones_like(bands)
        columns = torch.where(enough, of_columns >= least, columns)
        bands = torch.where(enough, of_bands >= least, bands)
    found = Bands(columns, bands, grid, copied=copied)
    dense = found.cells() > dense_above * grid.cells
    return Bands(columns & ~dense[:, None], bands | dense[:, None], grid, dense_rows, copied)


def _threshold(
    sample: StoredRows, columns: ByColumn, bands: ByBand, alpha: float
) -> tuple[Float[Tensor, "head 1"], Bool[Tensor, "head 1"]]:
    """The highest density, to 4 %, from which on lines hold `alpha` of the sample; and whether one does."""
    least = math.log2(sample.rows / sample.grid.cells) - _BELOW
    step = (
        math.log2(sample.rows / sample.grid.queries) - least
    )  # with one cell in each row, a mean density is no higher
    low = torch.full_like(columns[:, :1], least)
    number = torch.arange(sample.thresholds, device=columns.device)
    reached = torch.zeros_like(low, dtype=torch.bool)
    while step > _FINE:
        step /= sample.thresholds
        tried = low + step * number
        enough = sample.held(columns, bands, tried.exp2()) >= alpha * sample.rows
        reached |= enough[:, :1]
        low = tried.gather(1, enough[:, 1:].sum(1, keepdim=True))
    return low.exp2(), reached
