"""Columns and bands of attention, or single vertical and slash lines, and which cells are theirs.

A *column* is a key position, a vertical line (Li et al. 2025, LoopServe, section 3.1). A *band* is what slash lines
become if attention is computed in blocks of 64 queries and 64 keys: band b is all blocks whose keys lie b blocks before
their queries. Band 0 is the diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

TILE = 64
"""Queries in a block."""
BAND = 16
"""Keys in a block, which divide the queries."""
PER = TILE // BAND
"""Bands that lie in the diagonal block."""
NEAR = 2 * PER
"""Bands that are always chosen: each query sees the 64 keys before it."""
ByBand = Float[Tensor, "head block"]


@dataclass(frozen=True)
class BlockGrid:
    """Tiles of queries, 64 if nothing else is said, and blocks of 16 keys, which begin where tiles do.

    The last key of a tile is in its band 0, and band b of all tiles are the blocks b blocks before.

    Attributes:
        queries: Number of queries, which are the last of the positions.
        keys: Number of keys.
        tile: Queries in a tile; 1 for single lines.
        block: Keys in a block, which divide these.
    """

    queries: int
    keys: int
    tile: int = TILE
    block: int = BAND

    @property
    def per(self) -> int:
        """Number of bands that lie in the diagonal block."""
        return self.tile // self.block

    @property
    def past(self) -> int:
        """Number of positions before the first query."""
        return self.keys - self.queries

    @property
    def before(self) -> int:
        """Number of blocks of keys before the first query."""
        return -(-self.past // self.block)

    @property
    def lead(self) -> int:
        """Number of keys that the first of these blocks lacks."""
        return self.block * self.before - self.past

    @property
    def tiles(self) -> int:
        """Number of blocks of queries."""
        return -(-self.queries // self.tile)

    @property
    def short(self) -> int:
        """Number of queries that the last tile lacks."""
        return -self.queries % self.tile

    @property
    def cells(self) -> int:
        """Number of causal cells: each query sees one key more than the one before."""
        return self.queries * (2 * self.keys - self.queries + 1) // 2

    def sparse_queries(self, dense_rows: int) -> int:
        """Number of queries before those that see everything: `dense_rows` at the end, and those of the same tile."""
        if not dense_rows:
            return self.queries
        return max(0, self.queries - dense_rows) // self.tile * self.tile

    @property
    def blocks(self) -> int:
        """Number of blocks of keys, and of bands."""
        return self.before + self.per * self.tiles

    def last_block(self, at: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
        """Return the last block of keys of the tile of the query at a position; its band 0."""
        return self.before + (at - self.past) // self.tile * self.per + self.per - 1

    def blocked(self, by_key: Tensor) -> Tensor:
        """Split the last dimension, of keys, into blocks, of which the first and the last are filled with zeros."""
        return rearrange(pad(by_key, (self.lead, self.short)), "... (block own) -> ... block own", own=self.block)

    def by_key(self, by_block: Tensor) -> Tensor:
        """Repeat the last dimension, of blocks, for the keys of each block."""
        every = repeat(by_block, "... block -> ... (block own)", own=self.block)
        return every[..., self.lead : self.lead + self.keys]


@lru_cache(4)  # the layers of a prompt are of one grid
def lengths_of(
    grid: BlockGrid, device: torch.device
) -> tuple[Int[Tensor, " key"], Int[Tensor, " key"], Int[Tensor, " block"]]:
    """Count the causal cells of each column, those of them in the tile of its own, and those of each band."""
    position = torch.arange(grid.keys)
    to_end = torch.minimum(grid.tile - (position - grid.past) % grid.tile, grid.keys - position)
    of_tile = torch.where(position >= grid.past, to_end, 0)
    near = grid.blocked(of_tile)[grid.before :].sum(1).view(-1, grid.per).sum(0).flip(0)
    far = crossed(grid, grid.blocked(torch.ones_like(position)).sum(1))
    columns = torch.arange(grid.keys, 0, -1).clamp(max=grid.queries)
    return columns.to(device), of_tile.to(device), torch.cat([near, far[grid.per :]]).to(device)


def crossed(grid: BlockGrid, counts: Shaped[Tensor, "*n block"]) -> Shaped[Tensor, "*n block"]:
    """Count the cells of a line that lines of the other kind cross, if the latter are of bands from `grid.per` on.

    Args:
        grid: The tiles.
        counts: Bands, each counted as 1, or the number of columns in each block.

    Returns:
        For a column of each block, or for each band.
    """
    # Every `per`-th of them meets the same line. The sums are along the last dimension, which is faster on a GPU.
    steps = pad(counts, (0, -grid.blocks % grid.per)).unflatten(-1, (-1, grid.per)).mT.cumsum(-1)
    so_far = steps.mT.flatten(-2)[..., : grid.blocks]
    met = so_far.flip(-1)
    met[..., : grid.before] -= so_far[..., : grid.before].flip(-1)
    return grid.tile * met - grid.short * counts.flip(-1)


@dataclass(frozen=True, eq=False)
class Lines:
    """The lines chosen for every head of a layer in one sequence, or several such choices.

    In blocks of 16 keys these are columns and bands, in blocks of 1 vertical and slash lines. All are restricted to the
    causal cells of the queries.

    Attributes:
        columns: Whether each key position is chosen.
        offsets: Whether each offset (query position less key position) is chosen, in blocks: each band. Where blocks
            have 16 keys, all heads have the first `PER` bands.
        grid: The tiles.
        dense_rows: So many queries at the end see everything, as do those of the same tile.
    """

    columns: Bool[Tensor, "*choice head key"]
    offsets: Bool[Tensor, "*choice head block"]
    grid: BlockGrid
    dense_rows: int = 0

    def __repr__(self) -> str:
        """Return how many lines are chosen, over all heads."""
        columns, offsets = int(self.columns.sum()), int(self.offsets.sum())
        return f"Lines(columns={columns}, offsets={offsets}, grid={self.grid}, dense_rows={self.dense_rows})"

    @classmethod
    def of(cls, columns: Tensor, offsets: Tensor, queries: int, dense_rows: int = 0) -> Lines:
        """Return the vertical and slash lines at these positions and offsets, of as many keys, in blocks of 1."""
        return cls(columns, offsets, BlockGrid(queries, columns.shape[-1], 1, 1), dense_rows)

    @property
    def dense(self) -> Bool[Tensor, "*choice head"]:
        """Which heads have all offsets, and so all cells."""
        return self.offsets.all(-1)

    @property
    def sparse_tiles(self) -> int:
        """Number of tiles before those that see everything."""
        return -(-self.grid.sparse_queries(self.dense_rows) // self.grid.tile)

    def attended(self) -> Float[Tensor, "*choice head"]:
        """Return the share of the causal cells that is computed, with the dense rows."""
        grid = self.grid
        sparse = grid.sparse_queries(self.dense_rows)
        if not sparse:
            return torch.ones(self.offsets.shape[:-1], device=self.offsets.device)
        before = replace(grid, queries=sparse, keys=grid.past + sparse)
        part = Lines(self.columns[..., : before.keys], self.offsets[..., : before.blocks], before)
        return (part.cells() + grid.cells - before.cells) / grid.cells

    def cells(self) -> Int[Tensor, "*choice head"]:
        """Return the number of cells on the lines, each counted once, without what dense rows see besides."""
        columns, of_tile, bands = lengths_of(self.grid, self.columns.device)
        far = self.offsets.long()
        far[..., : self.grid.per].zero_()
        outside_bands = columns - of_tile * self.offsets[..., :1] - self.grid.by_key(crossed(self.grid, far))
        return (self.offsets * bands).sum(-1) + (self.columns * outside_bands).sum(-1)

    def rows(self, at: Int[Tensor, " row"]) -> Bool[Tensor, "*choice head row key"]:
        """Return which keys the queries at these positions see."""
        grid = self.grid
        back = grid.last_block(at)[:, None] - torch.arange(grid.blocks, device=at.device)
        is_dense = at - grid.past >= grid.sparse_queries(self.dense_rows)
        on_offset = grid.by_key(self.offsets[..., back.clamp(min=0)] | is_dense[:, None])
        causal = at[:, None] >= torch.arange(grid.keys, device=at.device)
        return (self.columns[..., None, :] | on_offset) & causal
