"""Attention on columns and bands in Triton, of all heads in one launch; a dense head is one that has all bands.

`listed` lists the columns and bands of every head. A program of `_attend` computes a tile of queries of one head:
first the keys of the tile itself, then those on its list, under one softmax. Blocks of 16 keys of bands and single
keys of columns are fetched alike, 64 keys at a time. Query heads
that share keys are beside each other, so that keys are in the cache of the chip.

This module needs triton, so it is imported when it is used. `TRITON_INTERPRET=1`, set before, runs it on a CPU.
"""

# ruff: noqa: N803
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from triton.runtime.errors import OutOfResources

from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import BAND, PER, TILE, Lines

LOG2_E = 1.4426950408889634  # kernels compute powers of two
Options = Sequence[dict[str, int]]
# Kernels read global names only if these are constants of Triton.
_TILE, _BAND, _PER = tl.constexpr(TILE), tl.constexpr(BAND), tl.constexpr(PER)


def fitting(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a tensor of this dtype whose width is a power of two from 16 on and contiguous; the same one if it is so."""
    part = part.to(dtype)
    missing = max(16, triton.next_power_of_2(part.shape[2])) - part.shape[2]
    if missing:
        return pad(part, (0, missing))
    if part.stride(2) != 1:
        return part.contiguous()
    return part


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, options: Options, **sizes: int) -> None:
    """Launch a kernel with the first options whose shared memory the device has."""
    for number, option in enumerate(options, 1):
        try:
            kernel[grid](*arguments, **sizes, **option)
            return
        except OutOfResources:
            if number == len(options):
                raise


def listed(chosen: Bool[Tensor, "head line"]) -> tuple[Int[Tensor, "head number"], Int[Tensor, "head number"]]:
    """List the chosen columns or bands of each head for a kernel; nothing waits for a GPU.

    Returns:
        The numbers of the chosen ones, ascending, undefined after these; and how many of them are below each number.
    """
    chosen = pad(chosen, (0, 1))
    below = chosen.cumsum(1, dtype=torch.int32) - chosen.int()
    number = torch.arange(chosen.shape[1], dtype=torch.int32, device=chosen.device).expand_as(below)
    place = below.masked_fill(~chosen, chosen.shape[1] - 1)
    return torch.empty_like(below).scatter_(1, place.long(), number), below


TILINGS = (
    {"SIZE": 128, "num_warps": 4, "num_stages": 2},
    {"SIZE": 64, "num_warps": 4, "num_stages": 2},
    {"SIZE": 64, "num_warps": 4, "num_stages": 1},
    {"SIZE": 32, "num_warps": 4, "num_stages": 1},
)
"""Keys at a time, groups of 32 threads of a program, and steps in flight: from what is fastest on an H200 to what needs
the least shared memory; the first that fits is used."""


def attention_on(
    scores: Scores,
    value: Float[Tensor, "kv_head key d_value"],
    chosen: Lines,
    tilings: Options = TILINGS,
) -> Float[Tensor, "query head d_value"]:
    """Compute attention of all heads on columns and bands, in the dtype of the values."""
    grid = chosen.grid
    query, key, values = (fitting(part, value.dtype) for part in (scores.query, scores.key, value))
    out = torch.empty(scores.queries, scores.heads, values.shape[2], device=value.device, dtype=value.dtype)
    strides = (*query.stride()[:2], *key.stride()[:2], *values.stride()[:2])
    numbers = (scores.scaling * LOG2_E, scores.queries, scores.keys, grid.lead, grid.before, grid.blocks)
    arguments = (
        *(out, query, key, values, chosen.offsets.view(torch.uint8)),
        *listed(chosen.columns),
        *listed(chosen.offsets),
        *strides,
        *numbers,
        chosen.sparse_tiles,
    )
    sizes = {"GROUP": scores.heads // len(key), "WIDTH": key.shape[2], "VALUES": values.shape[2]}
    launch(_attend, (grid.tiles * scores.heads,), *arguments, options=tilings, **sizes)
    return out[:, :, : value.shape[2]]


@triton.jit
@no_type_check
def _add(q, key, value, own, key_row, value_row, inside, seen, scaling, top, total, sums):
    """Add keys to the softmax so far: largest score, sum of weights, and weighted values of every query."""
    own_key = key + own.to(tl.int64)[:, None] * key_row + tl.arange(0, q.shape[1])
    own_value = value + own.to(tl.int64)[:, None] * value_row + tl.arange(0, sums.shape[1])
    if seen is None:
        k, v = tl.load(own_key), tl.load(own_value)
    else:
        k = tl.load(own_key, mask=inside[:, None], other=0.0)
        v = tl.load(own_value, mask=inside[:, None], other=0.0)
    # In float32, three products on tensor cores: plain ones took 19 KB of local memory in each thread, these 0.5 KB.
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1) * scaling)
    weights = tl.exp2(scores * scaling - new[:, None])
    fade = tl.exp2(top - new)
    sums = tl.dot(weights.to(v.dtype), v, sums * fade[:, None], input_precision="tf32x3")
    return new, total * fade + tl.sum(weights, 1), sums


@triton.jit
@no_type_check
def _own_tile(queries, GROUP: tl.constexpr):
    """Find head, kv head and tile of a program: heads of a group beside each other, and the longest rows first."""
    number, tiles = tl.program_id(0), tl.cdiv(queries, _TILE)
    kv_head = number // (GROUP * tiles)
    return kv_head * GROUP + number % GROUP, kv_head, tiles - 1 - (number // GROUP) % tiles


@triton.jit
@no_type_check
def _in_bands(bands, first, last, lead, is_dense, SIZE: tl.constexpr):
    """Find the keys of bands on the list from `first` on, or of these bands themselves where a tile is dense."""
    few = tl.arange(0, SIZE)
    own = few % _BAND - lead
    for piece in tl.static_range(SIZE // _BAND):
        band = tl.where(is_dense, first + piece, tl.load(bands + first + piece))
        own += tl.where(few // _BAND == piece, (last - band) * _BAND, 0)
    return own


@triton.jit
@no_type_check
def _in_turn(
    entry, begin, whole, band_keys, column_keys, bands, columns, on_band, skipped, last, lead, keys, blocks, is_dense,
):  # fmt: skip
    """Find the keys of the tile (entries below 0), of bands, and of columns, and which are there as new."""
    of_bands = entry + whole
    is_band = (entry >= 0) & (of_bands < band_keys)
    number = skipped + of_bands // _BAND
    from_list = tl.load(bands + number, mask=is_band & (number < blocks), other=0)
    band = tl.where(is_dense, number, from_list)
    of_columns = of_bands - band_keys
    is_column = (entry >= 0) & (of_columns >= 0) & (of_columns < column_keys)
    column = tl.load(columns + of_columns, mask=is_column, other=keys)
    place = tl.where(is_band, (last - band) * _BAND - lead + of_bands % _BAND, column)
    place = tl.where(entry < 0, begin + _TILE + entry, place)
    inside = (place >= 0) & (place < keys)
    banded = tl.load(on_band + last - (place + lead) // _BAND, mask=inside & is_column, other=0)
    return place, inside & (banded == 0)


# Lengths do not change what is compiled.
@triton.jit(do_not_specialize=["queries", "keys", "lead", "before", "blocks", "sparse_tiles"])
@no_type_check
def _attend(
    out, query, key, value, on_band, columns, columns_below, bands, bands_below,
    query_head, query_row, key_head, key_row, value_head, value_row,
    scaling, queries, keys, lead, before, blocks, sparse_tiles,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of queries of one head."""
    head, kv_head, tile = _own_tile(queries, GROUP)
    past = keys - queries
    last = before + tile * _PER + _PER - 1  # block of its last key, from which bands are counted
    is_dense = tile >= sparse_tiles
    head = head.to(tl.int64)
    key += kv_head.to(tl.int64) * key_head
    value += kv_head.to(tl.int64) * value_head
    on_band += head * blocks
    columns += head * (keys + 1)
    columns_below += head * (keys + 1)
    bands += head * (blocks + 1)
    bands_below += head * (blocks + 1)
    rows = tile * _TILE + tl.arange(0, _TILE)
    real = rows < queries
    own_query = query + head * query_head + rows.to(tl.int64)[:, None] * query_row + tl.arange(0, WIDTH)
    q = tl.load(own_query, mask=real[:, None], other=0.0)
    top = tl.full([_TILE], -1e30, tl.float32)  # finite, so that what is not seen weighs exp(-inf) and not nan
    total = tl.zeros([_TILE], tl.float32)
    sums = tl.zeros([_TILE, VALUES], tl.float32)

    # Whole steps of bands before its own tile need no mask. The last band may lack its first keys: it comes later.
    skipped = tl.where(is_dense, _PER, tl.load(bands_below + _PER))
    reached = tl.where(is_dense, last + 1, tl.load(bands_below + last + 1))
    band_keys = (reached - skipped) * _BAND
    whole = tl.maximum(band_keys - tl.where(lead > 0, 1, 0), 0) // SIZE * SIZE
    for i in range(0, whole, SIZE):
        own = _in_bands(bands, skipped + i // _BAND, last, lead, is_dense, SIZE)
        top, total, sums = _add(q, key, value, own, key_row, value_row, None, None, scaling, top, total, sums)

    # Its own tile, what is left of the bands, then columns; those in a chosen band are there already.
    begin = past + tile * _TILE
    column_keys = tl.where(is_dense, 0, tl.load(columns_below + begin))
    at = past + tl.where(real, rows, 0)
    for i in range(0, band_keys - whole + column_keys + _TILE, SIZE):
        own, visible = _in_turn(
            i + tl.arange(0, SIZE) - _TILE, begin, whole, band_keys, column_keys, bands, columns,
            on_band, skipped, last, lead, keys, blocks, is_dense,
        )  # fmt: skip
        seen = tl.where(visible, own, keys)[None, :] <= at[:, None]
        top, total, sums = _add(q, key, value, own, key_row, value_row, visible, seen, scaling, top, total, sums)

    mean = sums / tl.where(real, total, 1.0)[:, None]
    heads = tl.num_programs(0) // tl.cdiv(queries, _TILE)
    own_out = out + (rows.to(tl.int64)[:, None] * heads + head) * VALUES + tl.arange(0, VALUES)
    tl.store(own_out, mean.to(out.dtype.element_ty), mask=real[:, None])
