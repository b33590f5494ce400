"""Sums over sampled rows of attention in Triton: no matrix of attention is stored, and nothing waits for the host.

The rows of the sample are multiplied with all keys again for each step of the choice; one step reads the keys once and
writes sums alone. The counterpart on a CPU is `choice.StoredRows`.

This module needs triton, so it is imported when it is used. `TRITON_INTERPRET=1`, set before, runs it on a CPU.
"""

# ruff: noqa: N803
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import BAND, BlockGrid, ByBand, Lines
from sinkscope.sparse.choice import ByColumn, ByThreshold, StoredRows
from sinkscope.sparse.triton import LOG2_E, fitting, launch

SIZE = 64
"""Keys at a time in the choice, and rows of the sample."""
CHUNK = 16
"""So many times these keys are read by a program."""
# Kernels read global names only if these are constants of Triton.
_SIZE, _CHUNK, _BAND = tl.constexpr(SIZE), tl.constexpr(CHUNK), tl.constexpr(BAND)


class ComputedRows(StoredRows):
    """Attention of some queries, computed anew for each sum.

    Args:
        scores: The scores of a layer.
        rows: Indices of the queries.
    """

    thresholds = 32

    def __init__(self, scores: Scores, rows: Int[Tensor, " row"]) -> None:
        self.scores, self.rows = scores, len(rows)
        self.grid = grid = BlockGrid(scores.queries, scores.keys)
        padded = pad(rows, (0, -len(rows) % SIZE)).to(scores.query.device, non_blocking=True)
        position = padded.to(torch.int32) + scores.past
        last = grid.last_block(position)
        position[len(rows) :].fill_(-1)  # which sees nothing
        key = fitting(scores.key, scores.key.dtype)
        query = fitting(scores.query, key.dtype).index_select(1, padded)
        self._arguments: list[Any] = [query, key, position, last, key.stride(0), key.stride(1), scores.scaling * LOG2_E]
        self._arguments += [scores.keys, grid.lead, grid.blocks]
        self._sizes = {"GROUP": scores.heads // len(key), "WIDTH": key.shape[2]}
        self._parts = len(padded) // SIZE
        self._chunks = -(-grid.blocks * BAND // (SIZE * CHUNK))
        partial = query.new_empty(scores.heads, len(padded), self._chunks, dtype=torch.float32)
        self._run(_normalisers, partial, query.new_zeros(scores.heads, len(padded), dtype=torch.float32))
        self._total = torch.logsumexp(partial * (1 / LOG2_E), 2) * LOG2_E

    def _run(self, kernel: Any, *arguments: Any, **sizes: int) -> None:
        options = [{"num_warps": 4, "num_stages": stages} for stages in (3, 2, 1)]
        grid = (self._chunks, self.scores.heads, self._parts)
        launch(kernel, grid, *arguments, *self._arguments, options=options, **self._sizes, **sizes)

    def sums(self, chosen: Lines) -> tuple[ByColumn, ByBand]:
        """Weight of each column outside the chosen bands, and of each band outside the chosen columns."""
        columns = self._total.new_empty(self.scores.heads, self._parts, self.grid.keys)
        bands = self._total.new_empty(self.scores.heads, SIZE * self._parts, self.grid.blocks)
        self._run(
            _sums, columns, bands, self._total, chosen.columns.view(torch.uint8), chosen.offsets.view(torch.uint8)
        )
        return columns.sum(1), bands.sum(1)

    def held(self, columns: ByColumn, bands: ByBand, least: ByThreshold) -> ByThreshold:
        """Weight on the lines whose densities reach each threshold; every cell counts once."""
        held = columns.new_empty(self.scores.heads, self._parts * self._chunks, least.shape[1])
        self._run(_held, held, self._total, columns, bands, least.contiguous(), THRESHOLDS=least.shape[1])
        return held.sum(1)


@triton.jit
@no_type_check
def _sampled(query, key, at, last, total, head_stride, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """What a program reads: numbers of rows, their queries, positions, last blocks and sums; and keys of the head."""
    head, part = tl.program_id(1), tl.program_id(2) * _SIZE + tl.arange(0, _SIZE)
    rows = head * (tl.num_programs(2) * _SIZE) + part
    q = tl.load(query + rows.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH))
    own_at = tl.load(at + part)
    norm = tl.where(own_at >= 0, tl.load(total + rows), 0.0)
    return rows, q, own_at, tl.load(last + part), norm, key + (head // GROUP).to(tl.int64) * head_stride


@triton.jit
@no_type_check
def _scores(q, key, at, stride, scaling, own, keys):
    """Scores of sampled rows against some keys, minus infinity where a row sees none."""
    inside = (own >= 0) & (own < keys)
    own_key = key + own.to(tl.int64)[:, None] * stride + tl.arange(0, q.shape[1])
    k = tl.load(own_key, mask=inside[:, None], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scaling
    return tl.where(inside[None, :] & (own[None, :] <= at[:, None]), scores, float("-inf"))


@triton.jit(do_not_specialize=["keys", "lead", "blocks"])  # once for prompts of all lengths
@no_type_check
def _normalisers(
    partial, total, query, key, at, last, head_stride, stride, scaling, keys, lead, blocks,
    GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Logarithm to base 2 of the sum of a row's weights in a chunk of keys."""
    chunk = tl.program_id(0)
    rows, q, own_at, _, _, key = _sampled(query, key, at, last, total, head_stride, GROUP, WIDTH)
    top = tl.full([_SIZE], -1e30, tl.float32)  # finite, so that what is not seen weighs exp(-inf) and not nan
    summed = tl.zeros([_SIZE], tl.float32)
    for step in range(_CHUNK):
        own = (chunk * _CHUNK + step) * _SIZE - lead + tl.arange(0, _SIZE)
        scores = _scores(q, key, own_at, stride, scaling, own, keys)
        new = tl.maximum(top, tl.max(scores, 1))
        summed = summed * tl.exp2(top - new) + tl.sum(tl.exp2(scores - new[:, None]), 1)
        top = new
    tl.store(partial + rows * tl.num_programs(0) + chunk, top + tl.log2(summed))


@triton.jit
@no_type_check
def _step(q, key, own_at, norm, stride, scaling, step, keys, lead):
    """The first block of a step of this program, its keys, and the attention of sampled rows to these."""
    start = (tl.program_id(0) * _CHUNK + step) * _SIZE
    own = start - lead + tl.arange(0, _SIZE)
    scores = _scores(q, key, own_at, stride, scaling, own, keys)
    return start // _BAND, own, tl.exp2(scores - norm[:, None])


@triton.jit(do_not_specialize=["keys", "lead", "blocks"])  # once for prompts of all lengths
@no_type_check
def _sums(
    columns, bands, total, on_column, on_band, query, key, at, last, head_stride, stride, scaling, keys, lead, blocks,
    GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sums of columns outside the chosen bands, and of each row's bands outside the chosen columns."""
    head, part = tl.program_id(1), tl.program_id(2)
    rows, q, own_at, last_block, norm, key = _sampled(query, key, at, last, total, head_stride, GROUP, WIDTH)
    columns += (head * tl.num_programs(2) + part).to(tl.int64) * keys
    bands += rows.to(tl.int64) * blocks
    on_column += head.to(tl.int64) * keys
    on_band += head * blocks
    for step in range(_CHUNK):
        first, own, probs = _step(q, key, own_at, norm, stride, scaling, step, keys, lead)
        inside = (own >= 0) & (own < keys)
        left = tl.load(on_column + own, mask=inside, other=1) == 0
        outside = tl.where(left[None, :], probs, 0.0)
        alone = probs
        for piece in tl.static_range(_SIZE // _BAND):
            block = first + piece
            in_block = (tl.arange(0, _SIZE) // _BAND) == piece
            # Blocks after a row weigh 0, and stand for the bands that it does not reach: each place is written once.
            back = last_block - block
            taken = tl.load(on_band + back, mask=back >= 0, other=0) != 0
            alone = tl.where(in_block[None, :] & taken[:, None], 0.0, alone)
            place = tl.where(back >= 0, back, back + blocks)
            place = tl.where(block < blocks, place, blocks)
            weight = tl.sum(tl.where(in_block[None, :], outside, 0.0), 1)
            tl.store(bands + place, weight, mask=place < blocks)
        tl.store(columns + own, tl.sum(alone, 0), mask=inside)


@triton.jit(do_not_specialize=["keys", "lead", "blocks"])  # once for prompts of all lengths
@no_type_check
def _held(
    held, total, columns, bands, least, query, key, at, last, head_stride, stride, scaling, keys, lead, blocks,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, THRESHOLDS: tl.constexpr,
):  # fmt: skip
    """Weight of a chunk on lines from each threshold on: a whole block where its band is, else the columns in it."""
    head, number = tl.program_id(1), tl.arange(0, THRESHOLDS)
    _, q, own_at, last_block, norm, key = _sampled(query, key, at, last, total, head_stride, GROUP, WIDTH)
    columns += head.to(tl.int64) * keys
    bands += head * blocks
    threshold = tl.load(least + head * THRESHOLDS + number)
    sums = tl.zeros([_SIZE, THRESHOLDS], tl.float32)
    for step in range(_CHUNK):
        first, own, probs = _step(q, key, own_at, norm, stride, scaling, step, keys, lead)
        rounded = probs.to(q.dtype)
        column = tl.load(columns + own, mask=(own >= 0) & (own < keys), other=-1.0)
        for piece in tl.static_range(_SIZE // _BAND):
            in_block = (tl.arange(0, _SIZE) // _BAND) == piece
            back = last_block - first - piece
            density = tl.load(bands + back, mask=back >= 0, other=-1.0)
            whole = tl.sum(tl.where(in_block[None, :], probs, 0.0), 1)
            reaching = (in_block[:, None] & (column[:, None] >= threshold[None, :])).to(q.dtype)
            of_columns = tl.dot(rounded, reaching, input_precision="tf32x3")
            sums += tl.where(density[:, None] >= threshold[None, :], whole[:, None], of_columns)
    place = (head * tl.num_programs(2) + tl.program_id(2)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(held + place * THRESHOLDS + number, tl.sum(sums, 0))
