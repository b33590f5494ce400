"""The lines of all heads in one Triton kernel for CUDA, which computes exactly the cells on the lines.

The index is like that of MInference's packaged kernel (Jiang et al. 2024): for every head and block of queries,
`block_count` and `blocks` name blocks of consecutive keys, and `column_count` and `column_index` single keys. Two
things are added, because that kernel computes whole blocks wherever a slash line passes, while here no cell off the
lines may count, and none twice. Slash lines with few neighbours are lone: `lone_count` and `lone_offset` list them, and
the kernel multiplies each query by its one key. In blocks, a mask admits the offsets that are not lone. Columns are
always gathered, so blocks and lone lines omit their keys. One softmax runs over the three parts.

This module needs triton, so it is imported when it is used. `TRITON_INTERPRET=1`, set before, runs it on a CPU.
"""

# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false, reportAttributeAccessIssue=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, no_type_check

import torch
import triton
import triton.language as tl
from einops import reduce, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.errors import warn
from sinkscope.lines.attention import Scores
from sinkscope.lines.head_lines import HeadLines
from sinkscope.models.grouped_heads import kv_head_of

KEYS = 64
"""Keys at a time."""
LONE = 64
"""Columns that take as long as one lone line: 67 on an H200, at widths of 128 in bfloat16 (docs/gpu.md)."""
_LOG2_E = 1.4426950408889634  # the kernel computes powers of two


@dataclass(frozen=True, eq=False)
class LineIndex:
    """What each block of queries computes; lists are padded after their counts.

    Attributes:
        size: Number of queries in a block.
        blocks: Blocks of keys, nearest first, as the number of keys from a block's first key to the first query.
        full: Whether all offsets in such a block are chosen, so that only columns need a mask.
        block_count: How many of `blocks` a block of queries meets.
        column_index: Keys of vertical lines, ascending.
        column_count: How many of these are not in the future of the whole block.
        lone_offset: Lone offsets, ascending.
        lone_count: How many of these reach a key.
        banded: Offsets computed in blocks.
    """

    size: int
    blocks: Int[Tensor, "head block"]
    full: Bool[Tensor, "head block"]
    block_count: Int[Tensor, "head row"]
    column_index: Int[Tensor, "head column"]
    column_count: Int[Tensor, "head row"]
    lone_offset: Int[Tensor, "head lone"]
    lone_count: Int[Tensor, "head row"]
    banded: Bool[Tensor, "head key"]

    def cells(self) -> Int[Tensor, " head"]:
        """Cells that are computed, or take as long."""
        columns = self.block_count * KEYS + self.column_count + self.lone_count * LONE
        return columns.sum(1) * self.size


def index_of(lines: HeadLines, size: int) -> LineIndex:
    """The index of these lines, for blocks of `size` queries, a multiple of `KEYS`."""
    vertical = lines.vertical
    keys = vertical.shape[1]
    device = vertical.device
    banded = _banded(lines.slash, size)
    lone = lines.slash & ~banded
    starts = torch.arange(lines.past, keys, size, device=device)
    ends = (starts + size).clamp(max=keys)
    # Block i begins i * KEYS keys before the last that fits before the end; these are its least and largest offset.
    block_number = torch.arange((keys + size - 2) // KEYS + 1, device=device)
    every = block_number * KEYS
    banded_before = _before(banded)
    up_to_largest = banded_before[:, (every + KEYS).clamp(max=keys)]
    up_to_least = banded_before[:, (every - size + 1).clamp(0, keys)]
    offsets = up_to_largest - up_to_least  # chosen offsets in each block
    touched = offsets > 0
    numbers = numbers_of(touched)
    all_chosen = offsets == size + KEYS - 1
    blocks_of_row = -(-(starts + size) // KEYS)
    return LineIndex(
        size=size,
        blocks=numbers * KEYS - size + KEYS,
        full=pad(all_chosen, (0, 1)).gather(1, numbers),
        block_count=_before(touched)[:, blocks_of_row.clamp(max=len(every))],
        column_index=numbers_of(vertical),
        column_count=_before(vertical)[:, ends],
        lone_offset=numbers_of(lone),
        lone_count=_before(lone)[:, ends],
        banded=banded,
    )


def numbers_of(chosen: Bool[Tensor, "head number"]) -> Int[Tensor, "head some"]:
    """Indices of the chosen entries, ascending, padded with the number of entries; nothing waits for the device."""
    heads, size = chosen.shape
    numbers = torch.full((heads, size + 1), size, device=chosen.device)
    places = torch.where(chosen, chosen.cumsum(1) - 1, size)  # the last is for entries that are not chosen
    numbers.scatter_(1, places, torch.arange(size, device=chosen.device).expand(heads, size))
    return numbers[:, :size]


def _banded(slash: Bool[Tensor, "head key"], size: int) -> Bool[Tensor, "head key"]:
    """Offsets that are cheaper in blocks than alone: decided for every run of neighbouring `KEYS` offsets."""
    padded = pad(slash, (0, -slash.shape[1] % KEYS))
    count = reduce(padded.long(), "head (block offset) -> head block", "sum", offset=KEYS)
    used = count > 0
    begins = used & ~pad(used, (1, 0))[:, :-1]
    run = begins.cumsum(1) * used  # from 1; 0: none
    none = count.new_zeros(len(count), count.shape[1] + 1)
    blocks_of_run = none.scatter_add(1, run, used.long())
    lines_of_run = none.scatter_add(1, run, count)
    better = LONE * lines_of_run > KEYS * blocks_of_run + size
    better_offsets = repeat(better.gather(1, run), "head block -> head (block offset)", offset=KEYS)
    return slash & better_offsets[:, : slash.shape[1]]


def _before(some: Tensor) -> Tensor:
    """How many entries are chosen before each, and in all."""
    return pad(some.cumsum(1, dtype=torch.int32), (1, 0))


def queries_at_once(dtype: torch.dtype) -> int:
    """Queries of a block, a multiple of `KEYS`."""
    if dtype.itemsize == 2:
        return 2 * KEYS
    return KEYS


def triton_heads(
    scores: Scores,
    value: Float[Tensor, "kv_head key d_value"],
    lines: HeadLines,
    index: LineIndex,
    heads: Int[Tensor, " some"],
    out: Float[Tensor, "head query d_value"],
) -> bool:
    """Write the attention of some heads into `out`; False if Triton failed, with a warning."""
    # Matrix products take widths that are powers of two, from 16 on.
    parts: list[Tensor] = []
    for part in (scores.query, scores.key, value):
        missing = max(16, triton.next_power_of_2(part.shape[2])) - part.shape[2]
        fitting = part.to(value.dtype)
        parts.append(pad(fitting, (0, missing)) if missing else fitting)
    whole = out
    if parts[2].shape[2] != out.shape[2]:
        whole = torch.empty(*scores.query.shape[:2], parts[2].shape[2], device=out.device, dtype=out.dtype)
    for mask in (index.banded, lines.vertical, index.full):
        parts.append(mask.byte())
    for table in (index.block_count, index.blocks, index.column_count, index.column_index):
        parts.append(table.int())
    kv_heads = kv_head_of(heads, scores.heads, len(value))
    parts += [index.lone_count.int(), index.lone_offset.int(), heads.int(), kv_heads.int()]
    arguments: list[Any] = [whole, *(part.contiguous() for part in parts)]
    arguments += [scores.scaling * _LOG2_E, scores.queries, scores.keys]
    arguments += [index.blocks.shape[1], index.column_index.shape[1], index.lone_offset.shape[1]]
    arguments += [parts[0].shape[2], parts[2].shape[2], index.size, KEYS]
    kernel, grid = cast(Any, _attend), (index.block_count.shape[1], len(heads))
    error: Exception | None = None
    for stages in (3, 2, 1):  # steps of the loop over keys that are in flight: fewer where shared memory is short
        options = {"num_warps": _warps(value.shape[2], index.size), "num_stages": stages}
        try:
            kernel[grid](*arguments, **options)
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except Exception as problem:  # compilers fail in many ways, or what was compiled does not fit
            error = problem
            continue
        if whole is not out:
            out[heads] = whole[heads, :, : out.shape[2]]
        return True
    reason = f"{type(error).__name__} {error}".splitlines()[0]
    warn(f"lines are not computed by Triton: {reason}")
    return False


def _warps(values: int, size: int) -> int:
    """Groups of 32 threads that share a block of `size` queries."""
    if values > 64 and size > KEYS:
        return 8
    return 4


@triton.jit
@no_type_check
def _add(q, own, inside, seen, key, value, scaling, top, total, sums, width: tl.constexpr, values: tl.constexpr):
    """Add keys to the softmax so far: largest score, sum of weights, and weighted values of every query."""
    places = own.to(tl.int64)
    k = tl.load(key + places[None, :] * width + tl.arange(0, width)[:, None], mask=inside[None, :], other=0.0)
    v = tl.load(value + places[:, None] * values + tl.arange(0, values), mask=inside[:, None], other=0.0)
    # In float32, three products on tensor cores: plain ones took 19 KB of local memory in each thread, these 0.5 KB.
    scores = tl.where(seen, tl.dot(q, k, input_precision="tf32x3") * scaling, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new[:, None]).to(v.dtype)
    fade = tl.exp2(top - new)
    sums = tl.dot(weights, v, sums * fade[:, None], input_precision="tf32x3")
    added = tl.sum(weights.to(tl.float32), 1)  # of the same weights as in the sums
    return new, total * fade + added, sums


@triton.jit
@no_type_check
def _add_one(full, own, seen, key, value, scaling, top, total, sums, width: tl.constexpr, values: tl.constexpr):
    """Add one key of each query to the softmax so far."""
    places = own.to(tl.int64)[:, None]
    k = tl.load(key + places * width + tl.arange(0, width), mask=seen[:, None], other=0.0)
    v = tl.load(value + places * values + tl.arange(0, values), mask=seen[:, None], other=0.0)
    product = tl.sum(full * k.to(tl.float32), 1) * scaling
    score = tl.where(seen, product, float("-inf"))
    new = tl.maximum(top, score)
    weight = tl.exp2(score - new)
    fade = tl.exp2(top - new)
    return new, total * fade + weight, sums * fade[:, None] + weight[:, None] * v.to(tl.float32)


@triton.jit
@no_type_check
def _seen_in_block(at, own, inside, all_seen, banded, vertical, keys):
    """Which keys of a block the queries see, without those on vertical lines."""
    offset = at[:, None] - own[None, :]
    limit = tl.where(all_seen == 0, keys, 0)
    looked_up = (offset >= 0) & (offset < limit)
    on_band = tl.load(banded + offset, mask=looked_up, other=0)
    on_vertical = tl.load(vertical + own, mask=inside, other=1)
    on_no_column = inside & (on_vertical == 0)
    return ((on_band | all_seen) != 0) & on_no_column[None, :]


@triton.jit
@no_type_check
def _attend(
    out,
    query,
    key,
    value,
    banded,
    vertical,
    whole,
    block_count,
    block_index,
    column_count,
    column_index,
    lone_count,
    lone_offset,
    heads,
    kv_heads,
    scaling,
    queries,
    keys,
    blocks,
    columns,
    lones,
    width: tl.constexpr,
    values: tl.constexpr,
    SIZE: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
):
    row = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    head = tl.load(heads + tl.program_id(1)).to(tl.int64)
    at_row = head * tl.num_programs(0) + row
    query += head * queries * width
    out += head * queries * values
    kv_head = tl.load(kv_heads + tl.program_id(1)).to(tl.int64)
    key += kv_head * keys * width
    value += kv_head * keys * values
    banded += head * keys
    vertical += head * keys
    column_index += head * columns
    lone_offset += head * lones
    block_index += head * blocks
    whole += head * blocks
    numbers = row * SIZE + tl.arange(0, SIZE)
    at = numbers + keys - queries
    wide = tl.arange(0, width)
    tall = tl.arange(0, values)
    few = tl.arange(0, KEYS)
    real = numbers < queries
    rows = numbers.to(tl.int64)[:, None]
    q = tl.load(query + rows * width + wide, mask=real[:, None], other=0.0)
    top = tl.full([SIZE], -1e30, tl.float32)  # finite, so that what is not seen weighs exp(-inf) and not nan
    total = tl.zeros([SIZE], tl.float32)
    sums = tl.zeros([SIZE, values], tl.float32)

    full = q.to(tl.float32)
    for i in range(tl.load(lone_count + at_row)):
        own = at - tl.load(lone_offset + i)
        seen = real & (own >= 0)
        on_vertical = tl.load(vertical + own, mask=seen, other=1)
        seen = seen & (on_vertical == 0)
        top, total, sums = _add_one(full, own, seen, key, value, scaling, top, total, sums, width, values)

    for i in range(tl.load(block_count + at_row)):
        own = row * SIZE + keys - queries - tl.load(block_index + i) + few
        inside = (own >= 0) & (own < keys)
        seen = _seen_in_block(at, own, inside, tl.load(whole + i), banded, vertical, keys)
        top, total, sums = _add(q, own, inside, seen, key, value, scaling, top, total, sums, width, values)

    seen_columns = tl.load(column_count + at_row)
    for i in range(0, seen_columns, KEYS):
        inside = i + few < seen_columns
        own = tl.load(column_index + i + few, mask=inside, other=keys)
        seen = own[None, :] <= at[:, None]
        top, total, sums = _add(q, own, inside, seen, key, value, scaling, top, total, sums, width, values)

    mean = sums / tl.where(real, total, 1.0)[:, None]
    tl.store(out + rows * values + tall, mean.to(out.dtype.element_ty), mask=real[:, None])
