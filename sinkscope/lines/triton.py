"""Attention on columns and bands in Triton, of all heads in one launch; a dense head is one that has all bands.

`index_of` lists the columns and bands of every head. A program of `_attend` computes a tile of queries of one head:
first the keys of the tile itself, then those on its list, under one softmax. Blocks of 16 keys of bands and single keys
of columns are fetched alike, 64 of them at a time. Query heads that share keys are beside each other, so that keys are
in the cache of the chip.

This module needs triton, so it is imported when it is used. `TRITON_INTERPRET=1`, set before, runs it on a CPU.
"""

# ruff: noqa: N803
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false, reportAttributeAccessIssue=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.lines.attention import Scores
from sinkscope.lines.bands import BAND, PER, TILE, Bands

LOG2_E = 1.4426950408889634  # kernels compute powers of two


def fitting(part: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of this dtype whose width is a power of two from 16 on and contiguous; the same one if it is so."""
    part = part.to(dtype)
    missing = max(16, triton.next_power_of_2(part.shape[2])) - part.shape[2]
    if missing:
        return pad(part, (0, missing))
    if part.stride(2) != 1:
        return part.contiguous()
    return part


@dataclass(frozen=True, eq=False)
class BandIndex:
    """What each tile of queries computes; lists are filled up to their counts.

    Attributes:
        columns: Chosen keys, ascending.
        column_count: How many of these lie before each block of keys.
        bands: Chosen bands, ascending; for programs of two tiles those that either of them needs, as the second counts.
        band_count: How many of these are below each number.
    """

    columns: Int[Tensor, "head key"]
    column_count: Int[Tensor, "head block"]
    bands: Int[Tensor, "head band"]
    band_count: Int[Tensor, "head band"]


@triton.jit
@no_type_check
def _listed(numbers, before, flags, count, start, size, number, LINES: tl.constexpr):
    """Append the numbers of set flags to a list, and write how many were before each row of flags."""
    per_row = tl.sum(flags, 1)
    earlier = count + tl.cumsum(per_row, 0) - per_row
    place = earlier[:, None] + tl.cumsum(flags, 1) - flags
    tl.store(numbers + place, number, mask=flags != 0)
    rows = start + tl.arange(0, LINES)
    tl.store(before + rows, earlier, mask=rows < size)
    return count + tl.sum(per_row, 0)


@triton.jit(do_not_specialize=["keys", "lead", "blocks", "places"])
@no_type_check
def _index(
    columns,
    column_count,
    bands,
    band_count,
    on_column,
    on_band,
    keys,
    lead,
    blocks,
    places,
    BAND: tl.constexpr,
    PER: tl.constexpr,
    WIDE: tl.constexpr,
    LINES: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    columns += head * keys
    column_count += head * blocks
    on_column += head * keys
    bands += head * places
    band_count += head * (places + 1)
    on_band += head * blocks
    count = 0
    for start in range(0, blocks, LINES):
        own = (start + tl.arange(0, LINES))[:, None] * BAND - lead + tl.arange(0, BAND)[None, :]
        flags = tl.load(on_column + own, mask=(own >= 0) & (own < keys), other=0).to(tl.int32)
        count = _listed(columns, column_count, flags, count, start, blocks, own, LINES)
    count = 0
    for start in range(0, places + 1, LINES * BAND):
        band = start + tl.arange(0, LINES * BAND)
        flags = tl.zeros([LINES * BAND], tl.int32)
        for other in tl.static_range(WIDE):  # a program of several tiles needs what any of them needs
            own = band - other * PER
            flags |= tl.load(on_band + own, mask=(own >= 0) & (own < blocks), other=0).to(tl.int32)
        earlier = count + tl.cumsum(flags, 0) - flags
        tl.store(bands + earlier, band, mask=flags != 0)
        tl.store(band_count + band, earlier, mask=band <= places)
        count += tl.sum(flags, 0)


def index_of(chosen: Bands, wide: int) -> BandIndex:
    """The index of these bands and columns, for programs of `wide` tiles of queries."""
    grid = chosen.grid
    heads, keys = chosen.columns.shape
    places = grid.blocks + PER * (wide - 1)
    made = {"dtype": torch.int32, "device": chosen.columns.device}
    found = BandIndex(
        torch.empty(heads, keys, **made),
        torch.empty(heads, grid.blocks, **made),
        torch.empty(heads, places, **made),
        torch.empty(heads, places + 1, **made),
    )
    flags = chosen.columns.view(torch.uint8), chosen.bands.view(torch.uint8)
    sizes = {"BAND": BAND, "PER": PER, "WIDE": wide, "LINES": 64}
    cast(Any, _index)[(heads,)](*vars(found).values(), *flags, keys, grid.lead, grid.blocks, places, **sizes)
    return found


@dataclass(frozen=True)
class Tiling:
    """How the attention kernel divides its work.

    Attributes:
        wide: Tiles of queries of a program, 1 or 2.
        size: Keys at a time.
        warps: Groups of 32 threads of a program.
        stages: Steps of the loop over keys that are in flight.
    """

    wide: int = 1
    size: int = 64
    warps: int = 4
    stages: int = 3


def attention_on(
    scores: Scores, value: Float[Tensor, "kv_head key d_value"], chosen: Bands, tiling: Tiling = Tiling()
) -> Float[Tensor, "query head d_value"]:
    """Attention of all heads on columns and bands, in the dtype of the values."""
    grid = chosen.grid
    index = index_of(chosen, tiling.wide)
    query, key, values = (fitting(part, value.dtype) for part in (scores.query, scores.key, value))
    out = torch.empty(scores.queries, scores.heads, values.shape[2], device=value.device, dtype=value.dtype)
    flags = chosen.columns.view(torch.uint8), chosen.bands.view(torch.uint8)
    strides: list[int] = []
    for part in (query, key, values, out.transpose(0, 1)):
        strides += part.stride()[:2]
    numbers = (scores.scaling * LOG2_E, scores.queries, scores.keys, grid.lead, grid.before, grid.blocks)
    sizes = {"GROUP": scores.heads // len(key), "WIDTH": key.shape[2], "VALUES": values.shape[2]}
    sizes |= {"WIDE": tiling.wide, "TILE": TILE, "BAND": BAND, "SIZE": tiling.size}
    programs = -(-grid.tiles // tiling.wide) * scores.heads
    cast(Any, _attend)[(programs,)](
        out,
        query,
        key,
        values,
        *flags,
        *vars(index).values(),
        *strides,
        *numbers,
        chosen.sparse_tiles,
        **sizes,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out[:, :, : value.shape[2]]


@triton.jit
@no_type_check
def _add(q, k, v, seen, scaling, top, total, sums):
    """Add keys to the softmax so far: largest score, sum of weights, and weighted values of every query."""
    # In float32, three products on tensor cores: plain ones took 19 KB of local memory in each thread, these 0.5 KB.
    scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="tf32x3") * scaling, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new[:, None])
    fade = tl.exp2(top - new)
    sums = tl.dot(weights.to(v.dtype), v, sums * fade[:, None], input_precision="tf32x3")
    return new, total * fade + tl.sum(weights, 1), sums


@triton.jit(do_not_specialize=["queries", "keys", "lead", "before", "blocks", "sparse_tiles"])  # once for all lengths
@no_type_check
def _attend(
    out,
    query,
    key,
    value,
    on_column,
    on_band,
    columns,
    column_count,
    bands,
    band_count,
    query_head,
    query_row,
    key_head,
    key_row,
    value_head,
    value_row,
    out_head,
    out_row,
    scaling,
    queries,
    keys,
    lead,
    before,
    blocks,
    sparse_tiles,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    BAND: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Own tiles first, then the keys of chosen bands and columns before them: heads of a group beside each other."""
    per: tl.constexpr = TILE // BAND
    programs = tl.cdiv(queries, TILE * WIDE)
    kv_head = tl.program_id(0) // (GROUP * programs)
    head = (kv_head * GROUP + tl.program_id(0) % GROUP).to(tl.int64)
    number = programs - 1 - (tl.program_id(0) // GROUP) % programs  # the longest rows first
    key += kv_head.to(tl.int64) * key_head
    value += kv_head.to(tl.int64) * value_head
    places = blocks + per * (WIDE - 1)
    on_column += head * keys
    on_band += head * blocks
    columns += head * keys
    bands += head * places
    rows = number * (TILE * WIDE) + tl.arange(0, TILE * WIDE)
    real = rows < queries
    at = keys - queries + rows
    wide, tall, few = tl.arange(0, WIDTH), tl.arange(0, VALUES), tl.arange(0, SIZE)
    places_of = query + head * query_head + rows.to(tl.int64)[:, None] * query_row + wide
    q = tl.load(places_of, mask=real[:, None], other=0.0)
    top = tl.full([TILE * WIDE], -1e30, tl.float32)  # finite, so that what is not seen weighs exp(-inf) and not nan
    total = tl.zeros([TILE * WIDE], tl.float32)
    sums = tl.zeros([TILE * WIDE, VALUES], tl.float32)
    tile = number * WIDE + tl.arange(0, TILE * WIDE) // TILE  # of each row
    row_dense = tile >= sparse_tiles
    row_block = before + tile * per + per - 1
    start = number * (TILE * WIDE) + keys - queries

    for step in tl.static_range((TILE * WIDE + SIZE - 1) // SIZE):  # the keys of its own tiles
        own = start + step * SIZE + few
        inside = own < keys
        k = tl.load(key + own.to(tl.int64)[:, None] * key_row + wide, mask=inside[:, None], other=0.0)
        v = tl.load(value + own.to(tl.int64)[:, None] * value_row + tall, mask=inside[:, None], other=0.0)
        seen = own[None, :] <= at[:, None]
        if WIDE > 1:
            earlier_blocks = row_block[:, None] - ((own + lead) // BAND)[None, :]
            in_band = tl.load(on_band + earlier_blocks, mask=seen & inside[None, :], other=0)
            in_column = tl.load(on_column + own, mask=inside, other=0)
            seen = seen & ((in_band != 0) | (in_column != 0)[None, :] | row_dense[:, None])
        top, total, sums = _add(q, k, v, seen & inside[None, :], scaling, top, total, sums)

    # Bands are counted from the last tile of the program, and those of its own tiles are done.
    last = before + (number * WIDE + WIDE) * per - 1
    own_bands: tl.constexpr = WIDE * per
    is_dense = number * WIDE + WIDE > sparse_tiles
    all_dense = few * 0 + (number * WIDE + WIDE) > sparse_tiles  # the same for each key
    skipped = tl.load(band_count + head * (places + 1) + own_bands)
    reached = tl.load(band_count + head * (places + 1) + tl.minimum(last + 1, places))
    band_keys = tl.where(is_dense, last + 1 - own_bands, reached - skipped) * BAND
    first_block = before + number * (WIDE * per)
    column_keys = tl.load(column_count + head * blocks + first_block)
    listed = band_keys + tl.where(is_dense, 0, column_keys)
    for i in range(0, listed, SIZE):
        entry = i + few
        is_band = entry < band_keys
        from_list = tl.load(bands + skipped + entry // BAND, mask=is_band & (all_dense == 0), other=0)
        band = tl.where(is_dense, own_bands + entry // BAND, from_list)
        column = tl.load(columns + entry - band_keys, mask=(entry < listed) & (is_band == 0), other=keys)
        own = tl.where(is_band, (last - band) * BAND - lead + entry % BAND, column)
        inside = (own >= 0) & (own < keys)
        k = tl.load(key + own.to(tl.int64)[:, None] * key_row + wide, mask=inside[:, None], other=0.0)
        v = tl.load(value + own.to(tl.int64)[:, None] * value_row + tall, mask=inside[:, None], other=0.0)
        back = last - (own + lead) // BAND
        banded = tl.load(on_band + back, mask=inside & (back < blocks), other=0) != 0
        if WIDE == 1:  # a column in a chosen band is there already
            visible = (inside & (is_band | (banded == 0)))[None, :]
        else:
            earlier = tl.load(on_band + back - per, mask=inside, other=0) != 0
            on = tl.load(on_column + own, mask=inside & all_dense, other=0) != 0
            here = inside & (all_dense | (banded == is_band))
            there = inside & ((earlier == is_band) | (all_dense & (on | earlier)))
            late = (tl.arange(0, TILE * WIDE) >= TILE)[:, None]
            visible = tl.where(late, here[None, :], there[None, :] | (inside[None, :] & row_dense[:, None]))
        top, total, sums = _add(q, k, v, visible, scaling, top, total, sums)

    mean = sums / tl.where(real, total, 1.0)[:, None]
    places_of = out + head * out_head + rows.to(tl.int64)[:, None] * out_row + tall
    tl.store(places_of, mean.to(out.dtype.element_ty), mask=real[:, None])
