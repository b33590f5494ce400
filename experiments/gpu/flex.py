"""Attention on columns and bands as one call of FlexAttention, to be timed beside the package's Triton kernel.

1. The columns of each query head are gathered and stand in front of its keys, filled up to whole blocks of 64.
2. Four bands are one block of 64 keys, as tiles of queries are. The prompt has whole tiles.
3. A tile lists the blocks of columns before it, of which it sees those that exist, come before the query, and are in no
   band of its own; the blocks of which all four bands are chosen, whole; and those of which some are chosen, and its
   own, under the mask.

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
from sinkscope.sparse.bands import BAND, PER, TILE, Lines

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class FlexBands:
    """A choice in the form that FlexAttention takes.

    Attributes:
        chosen: Columns and bands; every head has a column.
        place: Key of each gathered column, `[head slot]`; the number of keys where there is none.
    """

    chosen: Lines
    place: Tensor

    @classmethod
    def of(cls, chosen: Lines) -> FlexBands:
        """List the columns of each head."""
        most = int(chosen.columns.sum(1).max())  # waits for the device
        number = torch.arange(chosen.grid.keys, device=chosen.columns.device).expand_as(chosen.columns)
        place = torch.where(chosen.columns, number, chosen.grid.keys).sort(1).values
        return cls(chosen, place[:, : -(-most // TILE) * TILE].contiguous())

    def gathered(self, by_key: Tensor) -> Tensor:
        """Return keys or values with the columns of each query head in front, `[head slot width]`."""
        own = by_key.repeat_interleave(len(self.place) // len(by_key), 0)
        columns = self.place.clamp(max=self.chosen.grid.keys - 1)[..., None].expand(-1, -1, own.shape[2])
        return torch.cat([own.gather(1, columns), own], 1)

    def mask(self) -> Mask:
        """Return what says whether a query sees a slot in a head."""
        place, bands, sparse = self.place, self.chosen.offsets, self.chosen.sparse_tiles
        slots = place.shape[1]

        def sees(_batch: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            is_column, tile = slot < slots, query // TILE
            key = torch.where(is_column, place[head, slot.clamp(max=slots - 1)], slot - slots)
            in_band = bands[head, (tile * PER + PER - 1 - key // BAND).clamp(min=0)] | (tile >= sparse)
            return (key <= query) & (in_band != is_column)

        return sees

    def block_mask(self) -> BlockMask:
        """Return the listed blocks of each tile and head; none is searched for."""
        grid, sparse, slots = self.chosen.grid, self.chosen.sparse_tiles, self.place.shape[1]
        tile = torch.arange(grid.tiles, device=self.place.device)
        back = tile[:, None] - tile  # blocks of 64 keys
        four = pad(self.chosen.offsets, (0, PER)).unflatten(1, (-1, PER))
        some, whole = four.any(2)[:, back.clamp(min=0)], four.all(2)[:, back.clamp(min=0)]
        dense = (tile >= sparse)[:, None]
        full = (whole | dense) & (back > 0)
        part = (some | dense) & (back >= 0) & ~full
        columns = torch.searchsorted(self.place, (tile * TILE).expand(len(self.place), -1).contiguous())
        columns = torch.where(tile >= sparse, 0, columns)
        in_front = torch.arange(0, slots, TILE, device=self.place.device) < columns[..., None]
        lists: list[Tensor] = []
        for front, own in ((in_front, part), (torch.zeros_like(in_front), full)):
            blocks = torch.cat([front, own], 2)
            lists.append(blocks.sum(2, dtype=torch.int32)[None])
            lists.append(blocks.int().argsort(dim=2, descending=True, stable=True).int()[None].contiguous())
        lengths = (grid.queries, slots + grid.keys)
        return BlockMask.from_kv_blocks(
            *lists, BLOCK_SIZE=(TILE, TILE), mask_mod=self.mask(), seq_lengths=lengths, compute_q_blocks=False
        )


def flex_bands(scores: Scores, value: Tensor, chosen: Lines, attend: Callable[..., Any], **options: Any) -> Tensor:
    """Attention `[head query d_value]` on columns and bands by FlexAttention, as given or compiled."""
    flex = FlexBands.of(chosen)
    given = scores.query[None], flex.gathered(scores.key)[None], flex.gathered(value)[None]
    return attend(*given, block_mask=flex.block_mask(), scale=scores.scaling, **options)[0]
