"""Attention on chosen cells alone: on columns and bands in blocks, on single lines under a mask, or on everything.

On CUDA, one Triton kernel computes all heads on columns and bands (`triton.py`). On a CPU each head is computed
separately, tile by tile of queries: the keys of a tile are those of its bands and the columns outside of these, which
are gathered for one matrix product. Heads that have all bands are computed by PyTorch's own attention there.

Single slash lines are no faster than dense attention: they are computed under a mask, for comparisons.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.lines.attention import Scores
from sinkscope.lines.bands import BAND, PER, TILE, Bands
from sinkscope.lines.devices import triton_module
from sinkscope.lines.head_lines import HeadLines
from sinkscope.models.grouped_heads import kv_head_of

_ROWS = 1024  # queries at a time for which a mask is built
_TILES = 64  # tiles at a time whose keys are listed
Values = Float[Tensor, "kv_head key d_value"]
Attended = Float[Tensor, "head query d_value"]


def band_attention(scores: Scores, value: Values, chosen: Bands) -> Attended:
    """Compute causal attention on the columns and bands of every head; the queries are at the last positions.

    Args:
        scores: The scores of a layer without window, soft cap and learned sinks.
        value: Values of all positions.
        chosen: Columns and bands of every query head.

    Returns:
        The output, in the dtype of `value`, computed in float32 (Triton computes in the dtype of the values and
        accumulates in float32).

    Raises:
        SinkscopeError: Shapes do not fit, or on a CPU a head lacks the first bands.
        UnsupportedError: An input requires gradients, or triton is not installed on a GPU.
    """
    _check(scores, value, chosen.columns.shape, chosen.grid.queries)
    module = triton_module(value.device, "triton")
    if module is not None:
        return module.attention_on(scores, value, chosen).transpose(0, 1)
    if not bool(chosen.bands[:, :PER].all()):  # a GPU would have to wait for it
        raise SinkscopeError("bands of a head lack their own tile: expected the first bands among them")
    out = torch.empty(scores.heads, scores.queries, value.shape[-1], device=value.device, dtype=value.dtype)
    is_dense = chosen.dense.tolist()
    every = range(scores.heads)
    _side_by_side(lambda head: _tiles(scores, value, chosen, head, out[head]), [h for h in every if not is_dense[h]])
    _dense(scores, value, [head for head in every if is_dense[head]], out)
    return out


def line_attention(scores: Scores, value: Values, lines: HeadLines, dense_rows: int = 0) -> Attended:
    """Compute causal attention on single lines of every head, under a mask: as slow as dense attention or slower.

    Args:
        scores: As for `band_attention`.
        value: Values of all positions.
        lines: Chosen lines of every query head. The main diagonal must be among them.
        dense_rows: Number of queries at the end that see everything.

    Raises:
        SinkscopeError: Shapes do not fit, or a head lacks the main diagonal.
        UnsupportedError: An input requires gradients.
    """
    _check(scores, value, lines.vertical.shape, lines.queries)
    if not bool(lines.slash[:, 0].all()):
        raise SinkscopeError("lines of a head lack the main diagonal: expected it among them")
    out = torch.empty(scores.heads, scores.queries, value.shape[-1], device=value.device, dtype=value.dtype)

    def seen(heads: list[int], start: int, stop: int) -> Tensor:
        keys = torch.arange(stop, device=value.device)
        at = keys[start:, None]
        late = (at >= scores.keys - dense_rows) & (at >= keys)
        return HeadLines(lines.chosen[heads, :, :stop], stop - start).rows(keys[start:]) | late

    _by_torch(scores, value, list(range(scores.heads)), out, _ROWS, seen)
    return out


def dense_attention(scores: Scores, value: Values) -> Attended:
    """Compute plain causal attention of all heads, in the dtype of the values."""
    out = value.new_empty(scores.heads, scores.queries, value.shape[-1])
    _dense(scores, value, list(range(scores.heads)), out)
    return out


def _check(scores: Scores, value: Tensor, lines: torch.Size, line_queries: int) -> None:
    scores.check_plain()
    query, key = scores.query, scores.key
    learned = query.requires_grad or key.requires_grad or value.requires_grad
    if learned and torch.is_grad_enabled():
        raise UnsupportedError("attention on lines has no gradients: call it, or the model, under torch.no_grad()")
    heads, queries, width = query.shape
    kv_heads, keys = value.shape[:2]
    fits = keys and heads % kv_heads == 0 and key.shape == (kv_heads, keys, width)
    if not fits or lines != (heads, keys) or line_queries != queries:
        raise SinkscopeError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}, lines {tuple(lines)}: "
            "expected the same positions and widths, and heads in equal groups"
        )


def _tiles(scores: Scores, value: Tensor, chosen: Bands, head: int, out: Float[Tensor, "query d_value"]) -> None:
    """Write the attention of one head, tile by tile."""
    grid, width = chosen.grid, scores.key.shape[2]
    kv_head = kv_head_of(head, scores.heads, len(value))
    query = scores.query[head].float() * scores.scaling
    both = torch.cat([scores.key[kv_head].float(), value[kv_head].float()], 1)  # so that they are gathered at once
    future = torch.ones(TILE, TILE, dtype=torch.bool).triu_(1)
    for first in range(0, grid.tiles, _TILES):
        numbers = torch.arange(first, min(grid.tiles, first + _TILES))
        for number, keys in zip(numbers.tolist(), _keys_of_tiles(chosen, head, numbers), strict=True):
            start = number * TILE
            stop = min(grid.queries, start + TILE)
            met = both[: grid.past + stop]
            if number < chosen.sparse_tiles:
                met = both.index_select(0, keys)
            weights = query[start:stop] @ met[:, :width].T
            weights[:, start - stop :].masked_fill_(future[: stop - start, : stop - start], -torch.inf)
            torch.softmax(weights, 1, out=weights)
            out[start:stop] = weights @ met[:, width:]


def _keys_of_tiles(chosen: Bands, head: int, tiles: Int[Tensor, " tile"]) -> tuple[Int[Tensor, " some"], ...]:
    """The keys that some tiles of a head meet: columns outside its bands, those of bands, and those of the tile.

    Listing them costs less than asking of each key whether a tile meets it.
    """
    grid, bands = chosen.grid, chosen.bands[head]
    last = (grid.before + tiles * PER + PER - 1)[:, None]  # block of a tile's last key
    columns = chosen.columns[head].nonzero().flatten()
    back = last - (columns + grid.lead) // BAND
    alone = (back >= PER) & ~bands[back.clamp(min=0)]
    far = bands.nonzero().flatten()[PER:].flip(0)
    begin = (last - far) * BAND - grid.lead
    of_bands = (begin[:, :, None] + torch.arange(BAND)).flatten(1)
    own = grid.past + tiles[:, None] * TILE + torch.arange(TILE)
    keys = torch.cat([columns.expand(len(tiles), -1), of_bands, own], 1)
    met = torch.cat([alone, of_bands >= 0, own < grid.keys], 1)
    return keys[met].split(met.sum(1).tolist())


def _side_by_side(compute: Callable[[int], None], heads: list[int]) -> None:
    """Compute each head in its own thread, because the matrix products of one head are too small to split."""
    threads = torch.get_num_threads()
    if min(threads, len(heads)) < 2:
        for head in heads:
            compute(head)
        return
    inference = torch.is_inference_mode_enabled()

    def work(head: int) -> None:
        with torch.inference_mode(inference):
            compute(head)

    try:
        with ThreadPoolExecutor(min(threads, len(heads)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(work, heads))
    finally:
        torch.set_num_threads(threads)  # the number that a thread sets is also what new threads start with


def _dense(scores: Scores, value: Tensor, heads: list[int], out: Tensor) -> None:
    """Plain causal attention of some heads, on 4-D tensors: for other shapes PyTorch builds the whole matrix."""
    from torch.nn.attention.bias import causal_lower_right  # loads sympy, for which no help need wait

    rows = scores.queries
    if scores.past:
        rows = _ROWS  # at a time: on a CPU PyTorch builds their mask
    _by_torch(scores, value, heads, out, rows, lambda _, start, stop: causal_lower_right(stop - start, stop))


def _by_torch(
    scores: Scores, value: Tensor, heads: list[int], out: Tensor, rows: int, mask: Callable[[list[int], int, int], Any]
) -> None:
    """Write PyTorch's attention of some heads, some rows at a time.

    Args:
        scores: The scores of a layer.
        value: Values of all positions.
        heads: The heads, ascending.
        out: Where it is written.
        rows: Number of queries at a time.
        mask: Gives the mask of some heads, of the queries at positions from the second to before the third argument.
    """
    kv_head = partial(kv_head_of, heads=scores.heads, kv_heads=len(value))
    for own_head, some in groupby(heads, key=kv_head):  # so that no keys are copied
        own = list(some)
        for start in range(scores.past, scores.keys, rows):
            stop = min(scores.keys, start + rows)
            at = slice(start - scores.past, stop - scores.past)
            parts = scores.query[own, at], scores.key[own_head, None, :stop], value[own_head, None, :stop]
            query, key, values = (part.to(out.dtype)[None] for part in parts)
            seen = mask(own, start, stop)
            out[own, at] = scaled_dot_product_attention(
                query, key, values, seen, scale=scores.scaling, enable_gqa=len(own) > 1
            )[0]
