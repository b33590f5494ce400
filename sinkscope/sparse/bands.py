"""Columns and bands of attention, and the blocks of keys that a text which copies itself needs.

A *column* is a key position, a vertical line (Li et al. 2025, LoopServe, section 3.1). A *band* is what slash lines
become if attention is computed in blocks of 64 queries and 64 keys: band b is all blocks whose keys lie b blocks before
their queries. Band 0 is the diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakValueDictionary

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
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
FAR = 256
"""Tokens between the end of a phrase and the end of its copy, at least."""
AROUND = (-1, 2)
"""First and last key that a copy needs, counted from the last token of the original."""
_ID_BITS = 21  # of an id: three fit into 63
ByBand = Float[Tensor, "head block"]


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
class Copies:
    """Queries that are copies, and the single blocks of keys that all heads see because the text copies itself there.

    Attributes:
        at: Indices of these queries, on the CPU.
        tile: The tile of queries that sees a block, ascending.
        block: The block of keys; none of its keys comes after a query of the tile.
        start: Number of pieces in the tiles before each tile, and in all tiles.
    """

    at: Int[Tensor, " copy"]
    tile: Int[Tensor, " piece"]
    block: Int[Tensor, " piece"]
    start: Int[Tensor, " more_than_tiles"]

    @classmethod
    def of(cls, ids: Int[Tensor, " pos"], queries: int, device: torch.device) -> Copies:
        """Find the copies among the last `queries` tokens of a text.

        Args:
            ids: Ids of the whole text, on the CPU; those below 0 are unknown, and no copies.
            queries: Number of queries.
            device: Device of the prompt.
        """
        grid = BlockGrid(queries, len(ids))
        at, original = copies_in(ids)
        at, original = at[at >= grid.past] - grid.past, original[at >= grid.past]
        keys = (original[:, None] + torch.tensor(AROUND)).clamp(min=0) + grid.lead
        tile = (at // TILE)[:, None].expand_as(keys)  # the first and the last key are in one block or two
        return cls.at_blocks(at, tile.flatten(), keys.flatten() // BAND, grid, device)

    @classmethod
    def at_blocks(
        cls, at: Tensor, tile: Int[Tensor, " pair"], block: Int[Tensor, " pair"], grid: BlockGrid, device: torch.device
    ) -> Copies:
        """Return these pairs of tiles and blocks, each once."""
        pieces = (tile * grid.blocks + block).unique()
        tile = pieces // grid.blocks
        start = torch.searchsorted(tile, torch.arange(grid.tiles + 1, device=tile.device))
        return cls(at, tile.to(device), (pieces % grid.blocks).to(device), start.to(device))

    def rows(self, tiles: Int[Tensor, " row"], grid: BlockGrid) -> Bool[Tensor, "row block"]:
        """Return which blocks the queries of these tiles see."""
        own = (tiles[:, None] == self.tile).int()
        return own.new_zeros(len(tiles), grid.blocks).scatter_add_(1, self.block.expand_as(own), own) > 0


def copies_in(ids: Int[Tensor, " pos"]) -> tuple[Int[Tensor, " copy"], Int[Tensor, " copy"]]:
    """Find the positions of copies, ascending, and of their originals.

    Args:
        ids: Ids of a text; those below 0 are unknown, and no copies.
    """
    phrase = ids[2:]
    known = ids[2:] >= 0
    for back in (1, 2):
        before = ids[2 - back : len(ids) - back]
        phrase, known = phrase + (before << back * _ID_BITS), known & (before >= 0)
    places = known.nonzero()[:, 0]
    order = places[phrase[places].argsort(stable=True)]  # equal phrases side by side, in the order of the text
    is_copy = (phrase[order].diff() == 0) & (order.diff() >= FAR)
    place = order[1:][is_copy].sort()
    return place.values + 2, order[:-1][is_copy][place.indices] + 2


@dataclass(frozen=True, eq=False)
class Bands:
    """The columns and bands chosen for every head of a layer in one sequence.

    Attributes:
        columns: Whether each key position is chosen.
        bands: Whether each band is chosen. All heads have the first `PER` bands; a dense head has all.
        grid: The tiles.
        dense_rows: So many queries at the end see everything, as do those of the same tile.
        copies: Single blocks that all heads see besides.
        share: What `attended` returns, if it is known.
        lists: What `triton.lists_of` returns for these, if it is known.
    """

    columns: Bool[Tensor, "head key"]
    bands: Bool[Tensor, "head block"]
    grid: BlockGrid
    dense_rows: int = 0
    copies: Copies | None = None
    share: Float[Tensor, " head"] | None = None
    lists: tuple[Tensor, ...] = ()

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
        if self.share is not None:
            return self.share
        grid, sparse = self.grid, self.grid.sparse_queries(self.dense_rows)
        if not sparse:
            return torch.ones(len(self.bands), device=self.bands.device)
        before = BlockGrid(sparse, grid.past + sparse)
        part = Bands(self.columns[:, : before.keys], self.bands[:, : before.blocks], before, copies=self.copies)
        on_lines = part.cells()
        return (on_lines + grid.cells - before.cells) / grid.cells

    def cells(self) -> Float[Tensor, " head"]:
        """Return the number of cells on columns and bands, each counted once, without what dense rows see besides."""
        lengths = lengths_of(self.grid, self.columns.device)
        far = self.bands.float()
        far[:, :PER].zero_()
        left = lengths.columns - lengths.own - self.grid.by_key(crossed(self.grid, far))
        on_lines = (self.bands * lengths.bands).sum(1) + (self.columns * left).sum(1)
        if self.copies is None:
            return on_lines
        grid, copies = self.grid, self.copies
        inside = copies.tile < grid.tiles
        back = grid.before + copies.tile * PER + PER - 1 - copies.block
        alone = inside & ~self.bands[:, back * inside]
        others = grid.blocked((~self.columns).float()).sum(2)[:, copies.block * inside]
        queries = (grid.queries - copies.tile * TILE).clamp(max=TILE)
        return on_lines + (alone * others * queries).sum(1)

    def rows(self, at: Int[Tensor, " row"]) -> Bool[Tensor, "head row key"]:
        """Return which keys the queries at these positions see."""
        grid = self.grid
        back = grid.last_block(at)[:, None] - torch.arange(grid.blocks, device=at.device)
        tile = (at - grid.past) // TILE
        more = (tile >= self.sparse_tiles)[:, None]
        if self.copies is not None:
            more = more | self.copies.rows(tile, grid)
        in_band = grid.by_key(self.bands[:, back.clamp(min=0)] | more)
        return (self.columns[:, None] | in_band) & (at[:, None] >= torch.arange(grid.keys, device=at.device))
