"""FlexAttention's form of a choice: its mask and its listed blocks are the cells of columns and bands."""

from __future__ import annotations

import pytest
import torch
from lines_kit import dense, per_head
from test_bands import random_bands
from test_sparse_attention import inputs
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import assert_close

from experiments.gpu.flex import FlexBands, flex_bands
from sinkscope.sparse.bands import TILE

SIZES = [(300, 0, 16), (130, 211, 0), (64, 64, 1), (200, 30, 40), (1, 70, 0), (190, 128, 16)]


@pytest.mark.parametrize(("queries", "past", "dense_rows"), SIZES)
def test_mask_and_blocks_are_the_cells_of_the_choice(queries, past, dense_rows):
    chosen = random_bands(4, queries, queries + past, 3, dense_rows)
    flex, keys = FlexBands.of(chosen), queries + past
    lists = flex.block_mask()
    slots = lists.seq_lengths[1]
    every = torch.arange(4)[:, None, None], torch.arange(queries)[:, None], torch.arange(slots)
    sees = lists.mask_mod(torch.tensor(0), *every)
    found = torch.zeros(4, queries, keys + 1, dtype=torch.int64)
    place = torch.arange(slots - flex.slots) - flex.shift
    place = torch.where((place < 0) | (place > keys), keys, place).expand(4, -1)
    place = torch.cat([flex.place, place], 1)[:, None].expand_as(sees)
    found.scatter_add_(2, place, sees.long())
    assert torch.equal(found[..., :keys], chosen.rows(past + torch.arange(queries)).long())  # each cell once
    assert not found[..., keys].any()
    whole, part = torch.zeros(2, 4, chosen.grid.tiles, slots // TILE, dtype=torch.bool)
    for target, count, numbers in (
        (part, lists.kv_num_blocks, lists.kv_indices),
        (whole, lists.full_kv_num_blocks, lists.full_kv_indices),
    ):
        for head in range(4):
            for tile in range(chosen.grid.tiles):
                target[head, tile, numbers[0, head, tile, : count[0, head, tile]].long()] = True
    assert not (whole & part).any()
    cells = torch.nn.functional.pad(sees, (0, 0, 0, -queries % TILE)).unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE))
    real = (torch.arange(chosen.grid.tiles * TILE) < queries).view(-1, TILE)[None, :, :, None, None]
    assert torch.equal(whole & ~(cells | ~real).all(4).all(2), torch.zeros_like(whole))
    assert not (cells.any(4).any(2) & ~(whole | part)).any()


@pytest.mark.parametrize(("queries", "past", "dense_rows"), SIZES[:4])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_it_gives_the_attention_of_the_choice(queries, past, dense_rows):
    scores, value = inputs(4, 2, queries, queries + past, 0)
    chosen = random_bands(4, queries, queries + past, 3, dense_rows)
    found = flex_bands(scores, value, chosen, flex_attention)
    wanted = dense(scores, chosen.rows(past + torch.arange(queries))) @ per_head(value, 4)
    assert_close(found.double(), wanted, atol=1e-5, rtol=0)
