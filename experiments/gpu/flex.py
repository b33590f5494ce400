"""Attention on columns and bands as one call of FlexAttention, to be timed beside the package's Triton kernel.

1. The columns of each query head are gathered and stand in front of its keys, filled up to whole blocks of 64.
2. Keys are shifted so that blocks of 64 begin where tiles of queries do: four bands are one block.
3. A tile lists the blocks of columns before it, of which it sees those that exist, come before the query, and are in no
   band of its own; the blocks of which all four bands are chosen, whole; and those of which some are chosen or copied,
   and its own, under the mask.

Nothing waits for the device, but for the largest number of columns of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import BAND, PER, TILE, Bands

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class FlexBands:
    """A choice in the form that FlexAttention takes.

    Attributes:
        chosen: Columns and bands.
        place: Key of each gathered column, `[head slot]`; the number of keys where there is none.
        shift: Number of places before the first key, so that blocks begin where tiles do.
    """

    chosen: Bands
    place: Tensor
    shift: int

    @classmethod
    def of(cls, chosen: Bands) -> FlexBands:
        """List the columns of each head."""
        most = int(chosen.columns.sum(1).max())  # waits for the device
        slots = -(-most // TILE) * TILE
        keys = chosen.grid.keys
        number = torch.arange(keys, device=chosen.columns.device).expand_as(chosen.columns)
        place = torch.where(chosen.columns, number, keys).sort(1).values[:, :slots]
        return cls(chosen, pad(place, (0, slots - place.shape[1]), value=keys), -chosen.grid.past % TILE)

    @property
    def slots(self) -> int:
        """Number of places for columns."""
        return self.place.shape[1]

    def gathered(self, by_key: Tensor) -> Tensor:
        """Return keys or values with the columns of each query head in front, `[head slot width]`."""
        heads, grid = len(self.place), self.chosen.grid
        own = by_key.repeat_interleave(heads // len(by_key), 0)
        columns = self.place.clamp(max=grid.keys - 1)[..., None].expand(-1, -1, own.shape[2])
        missing = -(self.shift + grid.keys) % TILE
        return torch.cat([own.gather(1, columns), pad(own, (0, 0, self.shift, missing))], 1)

    def _copied(self) -> Tensor:
        """Which blocks of 16 keys a tile sees in all heads, `[tile block]`."""
        grid, copied = self.chosen.grid, self.chosen.copies
        seen = torch.zeros(grid.tiles, grid.blocks, dtype=torch.bool, device=self.place.device)
        if copied is not None:
            seen[copied.tile, copied.block] = True
        return seen

    def mask(self) -> Mask:
        """Return what says whether a query sees a slot in a head."""
        chosen, grid, place, slots, shift = self.chosen, self.chosen.grid, self.place, self.slots, self.shift
        bands, copied, sparse = chosen.bands, self._copied(), chosen.sparse_tiles

        def sees(_batch: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            is_column = slot < slots
            if slots:
                key = torch.where(is_column, place[head, slot.clamp(max=slots - 1)], slot - slots - shift)
            else:
                key = slot - shift
            exists = (key >= 0) & (key < grid.keys) & (key <= query + grid.past)
            block = (key.clamp(0, grid.keys - 1) + grid.lead) // BAND
            tile = query.clamp(max=grid.queries - 1) // TILE
            back = (grid.before + tile * PER + PER - 1 - block).clamp(0, grid.blocks - 1)
            in_band = bands[head, back] | (tile >= sparse)
            return exists & torch.where(is_column, ~in_band, in_band | (copied[tile, block] & ~self._listed(head, key)))

        return sees

    def _listed(self, head: Tensor, key: Tensor) -> Tensor:
        """Whether a key is a column of the head, and so in front already."""
        return self.chosen.columns[head, key.clamp(0, self.chosen.grid.keys - 1)]

    def block_mask(self) -> BlockMask:
        """Return the listed blocks of each tile and head; none is searched for."""
        chosen, grid = self.chosen, self.chosen.grid
        device, heads, tiles = self.place.device, len(self.place), grid.tiles
        tile = torch.arange(tiles, device=device)
        wide = -(-(self.shift + grid.keys) // TILE)  # blocks of 64 keys
        own = wide - tiles + tile  # that of the tile itself
        back = own[:, None] - torch.arange(wide, device=device)
        four = pad(chosen.bands, (0, -grid.blocks % PER + PER)).unflatten(1, (-1, PER))
        some, whole = four.any(2)[:, back.clamp(min=0)], four.all(2)[:, back.clamp(min=0)]
        copied = pad(self._copied(), (self._copied_lead, -(grid.blocks + self._copied_lead) % PER))
        some = some | copied.unflatten(1, (-1, PER)).any(2)
        before = (back > 0) & (torch.arange(wide, device=device) >= (self.shift > 0))  # the first may lack keys
        dense = (tile >= chosen.sparse_tiles)[:, None]
        full = (whole | dense) & before
        part = (some | dense) & (back >= 0) & ~full
        begins = (grid.past + tile * TILE).clamp(max=grid.keys)
        columns = torch.searchsorted(self.place, begins.expand(heads, -1).contiguous())
        columns = torch.where(tile >= chosen.sparse_tiles, 0, columns)
        in_front = torch.arange(self.slots // TILE, device=device) * TILE < columns[..., None]
        nothing = torch.zeros_like(in_front)
        partial_blocks, full_blocks = torch.cat([in_front, part], 2), torch.cat([nothing, full], 2)
        lists: list[Tensor] = []
        for blocks in (partial_blocks, full_blocks):
            lists.append(blocks.sum(2, dtype=torch.int32)[None])
            lists.append(blocks.int().argsort(dim=2, descending=True, stable=True).int()[None].contiguous())
        lengths = (grid.queries, self.slots + TILE * wide)
        return BlockMask.from_kv_blocks(
            *lists, BLOCK_SIZE=(TILE, TILE), mask_mod=self.mask(), seq_lengths=lengths, compute_q_blocks=False
        )

    @property
    def _copied_lead(self) -> int:
        """Number of blocks of 16 keys between the begin of the first block of 64 and that of the first of 16."""
        return (self.shift - self.chosen.grid.lead) // BAND


def flex_bands(scores: Scores, value: Tensor, chosen: Bands, attend: Callable[..., Any], **options: Any) -> Tensor:
    """Attention `[head query d_value]` on columns and bands by FlexAttention, as given or compiled."""
    flex = FlexBands.of(chosen)
    given = scores.query[None], flex.gathered(scores.key)[None], flex.gathered(value)[None]
    return attend(*given, block_mask=flex.block_mask(), scale=scores.scaling, **options)[0]
