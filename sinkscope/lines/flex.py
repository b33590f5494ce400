"""Compute the lines of all heads in one compiled FlexAttention call: the fallback on a GPU if Triton's kernel fails.

The columns of each head's vertical lines are gathered in front of the keys, and one softmax runs over both. Query heads
that share keys have their columns in sequence, so keys and values are not copied for each head. Only blocks that a line
touches are computed. In them, the mask admits each cell once: at the gathered column if it is on a vertical line,
otherwise at its own place. Uncompiled FlexAttention builds the whole matrix, so it is never called that way.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.lines.choice import HeadLines

BLOCK = 128
"""Queries and keys at a time."""
_failed: dict[tuple[object, ...], str] = {}


def why_not(query: Float[Tensor, "head query d_head"], value: Float[Tensor, "kv_head key d_value"]) -> str | None:
    """Why FlexAttention cannot be used for these inputs; None if it can, as far as is known before compiling it."""
    if query.shape[1] < BLOCK:
        return f"fewer than {BLOCK} queries"
    return _unavailable(query.device.type) or _failed.get(_kind(query, value))


@dataclass(frozen=True, eq=False)
class Blocks:
    """Which blocks of the matrix the lines touch, with the gathered columns in front of the keys.

    Attributes:
        columns: Vertical lines in ascending order, padded with the number of keys.
        some: Blocks with visible cells.
        full: Blocks in which every cell is visible.
    """

    columns: Int[Tensor, "head column"]
    some: Bool[Tensor, "head query_block key_block"]
    full: Bool[Tensor, "head query_block key_block"]

    def only(self, heads: Int[Tensor, " some"]) -> Blocks:
        """The blocks of these heads only."""
        there = torch.zeros(len(self.columns), 1, 1, dtype=torch.bool, device=heads.device).index_fill_(0, heads, True)
        return Blocks(self.columns, self.some & there, self.full & there)

    def placed(self, blocks: Bool[Tensor, "head query_block key_block"], group: int) -> Tensor:
        """The same blocks if `group` heads have their columns in sequence in front of the keys they share."""
        own, rest = blocks.split([self.columns.shape[1] // BLOCK, blocks.shape[2] - self.columns.shape[1] // BLOCK], 2)
        turn = torch.eye(group, dtype=torch.bool, device=blocks.device).repeat(len(blocks) // group, 1)
        return torch.cat([(own[:, :, None] & turn[:, None, :, None]).flatten(2), rest], 2)

    def cells(self) -> Int[Tensor, " head"]:
        """Cells in these blocks."""
        return self.some.sum((1, 2)) * BLOCK**2


def numbers_of(chosen: Bool[Tensor, "head number"], multiple: int = 1) -> Int[Tensor, "head some"]:
    """Indices of the chosen entries, ascending, padded with the number of entries to a multiple of the given size."""
    size = -(-max(1, int(chosen.sum(1).max())) // multiple) * multiple
    head, number = chosen.nonzero(as_tuple=True)
    numbers = torch.full((len(chosen), size), chosen.shape[1], device=chosen.device)
    numbers[head, chosen.cumsum(1)[head, number] - 1] = number
    return numbers


def blocks_of(lines: HeadLines) -> Blocks:
    """Blocks that have to be computed."""
    vertical, past = lines.vertical, lines.past
    keys, device = vertical.shape[1], vertical.device
    columns = numbers_of(vertical, BLOCK)
    first = torch.arange(past, keys, BLOCK, device=device)  # query of each block
    last = (first + BLOCK - 1).clamp(max=keys - 1)
    some = columns[:, None, ::BLOCK] <= last[:, None]
    full = columns[:, None, BLOCK - 1 :: BLOCK] <= first[:, None]
    begin = torch.arange(0, keys, BLOCK, device=device)
    end = (begin + BLOCK - 1).clamp(max=keys - 1)
    # Offsets of a block: from its upper right to its lower left corner.
    least, most = first[:, None] - end, last[:, None] - begin
    before = pad(lines.slash.cumsum(1, dtype=torch.int32), (1, 0))
    there = before[:, (most + 1).clamp(min=0)] - before[:, least.clamp(min=0)]
    shut = pad(vertical.cumsum(1, dtype=torch.int32), (1, 0))
    shut = (shut[:, end + 1] - shut[:, begin])[:, None]
    whole = (there == most - least + 1) & (shut == 0) & (least >= 0)
    return Blocks(columns, torch.cat([some, there > 0], 2), torch.cat([full, whole], 2))


def flex_heads(
    query: Float[Tensor, "head query d_head"],
    key: Float[Tensor, "kv_head key d_head"],
    value: Float[Tensor, "kv_head key d_value"],
    lines: HeadLines,
    blocks: Blocks,
    scaling: float,
) -> Float[Tensor, "head query d_value"] | None:
    """Attention on the lines, and zeros in heads without blocks; None if compiling failed, with one warning."""
    from torch.nn.attention.flex_attention import BlockMask

    keys, columns, device, group = key.shape[1], blocks.columns, key.device, len(query) // len(key)
    every = torch.arange(keys, device=device).expand(len(columns), -1)
    # Each kv head has the columns of all its query heads in front of its keys.
    gather = columns.clamp(max=keys - 1).unflatten(0, (-1, group)).flatten(1)
    kv = torch.arange(len(key), device=device)[:, None]
    some_keys, some_values = (torch.cat([tensor[kv, gather], tensor], 1)[None] for tensor in (key, value))
    # Position among the queries. Padding, and keys that are gathered, are in the future of all at their own place.
    at = torch.where(lines.vertical, lines.queries, every - lines.past)
    own = torch.where(columns == keys, lines.queries, columns - lines.past)
    at = torch.cat([own.repeat(1, group), at], 1).int()  # blocks hide what is another head's
    gathered = torch.arange(at.shape[1], device=device) < gather.shape[1]
    on_slash = pad(lines.slash, (lines.queries, 0))  # offsets below 0 are the future
    index = at - lines.queries
    mask = BlockMask.from_kv_blocks(
        *_ordered(blocks.placed(blocks.some & ~blocks.full, group)),
        *_ordered(blocks.placed(blocks.full, group)),
        BLOCK_SIZE=BLOCK,
        # A lambda, which is traced as it stands: nothing checks its types.
        mask_mod=lambda _, head, number, slot: (
            (gathered[slot] & (at[head, slot] <= number)) | on_slash[head, number - index[head, slot]]
        ),
        seq_lengths=(lines.queries, at.shape[1]),
    )
    why = ""
    for dynamic in (True, False):
        try:
            flex = _compiled(dynamic)
            made = flex(query[None], some_keys, some_values, block_mask=mask, scale=scaling, enable_gqa=group > 1)
            return made[0]
        except torch.OutOfMemoryError:  # which may not be so for the next prompt
            raise
        except Exception as error:  # compilers fail in many ways
            why = f"it could not be compiled: {_line(error)}"
    _failed[_kind(query, value)] = why
    _say(why)
    return None


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of blocks in each row, and their numbers, first of all, as FlexAttention wants them."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[None], order.int()[None].contiguous()


def _kind(query: Tensor, value: Tensor) -> tuple[object, ...]:
    return query.device.type, query.dtype, query.shape[-1], value.shape[-1]


@cache
def _unavailable(device: str) -> str | None:
    why = None
    if device not in ("cuda", "cpu"):
        return f"it is not used on {device}"
    try:
        off = getattr(importlib.import_module("torch._dynamo.config"), "disable", False)
        if off or _compiled(True) is _flex():  # what it was given comes back from a torch.compile that is off
            why = "torch.compile is switched off"
    except (ImportError, RuntimeError) as error:
        why = f"this PyTorch has none: {_line(error)}"
    if why is None and device == "cuda" and importlib.util.find_spec("triton") is None:
        why = "triton, which compiles for GPUs, is not installed"
    if why is not None:
        _say(why)
    return why


@cache
def _compiled(dynamic: bool) -> Callable[..., Any]:
    """The compiled function; `dynamic` compiles once for all lengths, otherwise once per length."""
    return torch.compile(_flex(), dynamic=dynamic, fullgraph=True)  # not a full graph: it would run uncompiled


def _flex() -> Callable[..., Any]:
    return importlib.import_module("torch.nn.attention.flex_attention").flex_attention


def _say(why: str) -> None:
    warnings.warn(f"lines are not computed by FlexAttention: {why}", stacklevel=2)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
