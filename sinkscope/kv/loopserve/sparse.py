"""Attention that computes chosen lines only, on any device, without a compiler (after MInference, Jiang et al. 2024).

A block of queries needs two kinds of keys: the columns of the vertical lines, gathered once per head, and for every
group of neighbouring offsets a band, which for these queries is a range of keys. Columns inside of a band's range are
computed with the band and left out of the gathered ones, so no cell is counted twice; one softmax runs over all parts.
A lone slash line would cost a range as long as the block for one cell in each row: it is computed row by row instead.
What all this costs is known before, and a head for which it is more than `dense_above` of dense attention is dense.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sinkscope.errors import SinkscopeError
from sinkscope.kv.loopserve.lines import HeadLines

BLOCKS = (64, 128, 256)
"""Queries at a time; the cheapest is taken, head by head."""
LONE = 24
"""Columns whose product takes as long as one lone slash line."""
_PART = 16  # columns whose product takes as long as the overhead of one more matrix product
DENSE_ABOVE = 0.6
"""Share of computed cells above which plain attention is as fast (measured on a CPU, float32, 4,096 positions)."""


@dataclass(frozen=True)
class Sparsity:
    """What sparse attention did in every head of a layer.

    Attributes:
        cells: share of the causal cells that lie on the lines.
        computed: share that was computed, in whole blocks, or what takes as long; 1.0 where attention was dense.
        dense: the head was computed by plain attention, because that is faster.
    """

    cells: tuple[float, ...]
    computed: tuple[float, ...]
    dense: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class _Plan:
    """How one head is computed.

    Attributes:
        block: queries at a time.
        bands: (lowest, highest) offset of each, highest offsets first; the last begins at 0.
        lone: offsets that are computed row by row.
        columns: vertical lines, in rising order.
        cost: cells that are computed, or take as long.
    """

    block: int
    bands: list[tuple[int, int]]
    lone: list[int]
    columns: list[int]
    cost: float

    def parts(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """For queries at positions `start` to `stop`: (first column, end column, first key, end of keys), in turns."""
        found, seen, taken = [], 0, 0
        for low, high in self.bands:
            begin, end = max(0, start - high), stop - low
            if end <= 0:
                continue
            until = bisect_left(self.columns, begin, lo=taken)
            found.append((taken, until, max(begin, seen), end))
            seen, taken = end, bisect_left(self.columns, end, lo=until)
        return found


def sparse_attention(
    query: Float[Tensor, "head query d_head"],
    key: Float[Tensor, "kv_head key d_head"],
    value: Float[Tensor, "kv_head key d_value"],
    lines: HeadLines,
    *,
    scaling: float | None = None,
    dense_above: float = DENSE_ABOVE,
) -> tuple[Float[Tensor, "head query d_value"], Sparsity]:
    """Causal attention on the lines of every head; the queries are the last of the positions.

    Args:
        query: of the new tokens, after rotary.
        key: of all positions, after rotary; query heads share them in groups.
        value: of all positions.
        lines: for every query head. The main diagonal must be among them.
        scaling: factor on the scores; None: one over the root of `d_head`.
        dense_above: share of computed cells above which a head is computed densely, with all its cells.

    Returns:
        The output, in the type of `value`, computed in float32; and what was computed.

    Raises:
        SinkscopeError: lines of another shape, or a head without the main diagonal.
    """
    heads, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    if lines.vertical.shape != (heads, keys) or lines.queries != queries or not bool(lines.slash[:, 0].all()):
        raise SinkscopeError(
            f"lines of {tuple(lines.vertical.shape)} with {lines.queries} queries for {heads} heads, {queries} queries "
            f"and {keys} keys: expected lines of this shape, the main diagonal among them"
        )
    scaling = float(query.shape[-1] ** -0.5) if scaling is None else scaling
    groups, every = heads // key.shape[0], int(lines.lengths().sum())
    plans = [plan_of(lines, head) for head in range(heads)]
    dense = tuple(plan.cost > dense_above * every for plan in plans)
    out = torch.empty(heads, queries, value.shape[-1], device=query.device, dtype=value.dtype)
    for head, plan in enumerate(plans):
        q, k, v = query[head].float(), key[head // groups].float(), value[head // groups].float()
        out[head] = _dense(q, k, v, scaling) if dense[head] else _head(q * scaling, k, v, lines.slash[head], plan)
    computed = tuple(1.0 if full else plan.cost / every for full, plan in zip(dense, plans, strict=True))
    return out, Sparsity(tuple(lines.density().tolist()), computed, dense)


def plan_of(lines: HeadLines, head: int) -> _Plan:
    """The cheapest way to compute a head."""
    columns = lines.vertical[head].nonzero().flatten().tolist()
    offsets = lines.slash[head].nonzero().flatten().tolist()
    keys, past = lines.vertical.shape[1], lines.past
    plans: list[_Plan] = []
    for block in BLOCKS:
        bands = _bands(offsets, block)
        lone = [offset for offset in offsets if not any(low <= offset <= high for low, high in bands)]
        plan = _Plan(block, bands, lone, columns, 0.0)
        cost = float(LONE * sum(min(keys - offset, lines.queries) for offset in lone))
        for start in range(past, keys, block):
            stop = min(keys, start + block)
            for first, until, begin, end in plan.parts(start, stop):
                cost += (stop - start) * (until - first + end - begin + _PART)
        plans.append(_Plan(block, bands, lone, columns, cost))
        if lines.queries <= block:
            break
    return min(plans, key=lambda plan: plan.cost)


def _bands(offsets: list[int], block: int) -> list[tuple[int, int]]:
    """Ranges of offsets that are cheaper together than one by one, the highest first."""
    groups = [[offsets[0]]]
    for offset in offsets[1:]:
        if offset - groups[-1][-1] <= max(1, LONE):
            groups[-1].append(offset)
        else:
            groups.append([offset])
    bands = [(0, groups[0][-1])]
    for group in groups[1:]:
        if len(group) * LONE < group[-1] - group[0] + block:
            continue
        if group[0] - bands[-1][1] <= block:  # their ranges of keys touch
            bands[-1] = (bands[-1][0], group[-1])
        else:
            bands.append((group[0], group[-1]))
    return bands[::-1]


def _head(query: Tensor, key: Tensor, value: Tensor, slash: Tensor, plan: _Plan) -> Tensor:
    """One head, block by block; `query` is scaled."""
    queries, keys = len(query), len(key)
    past, device = keys - queries, key.device
    index = torch.tensor(plan.columns, device=device, dtype=torch.long)
    some_keys, some_values = key.index_select(0, index), value.index_select(0, index)
    other = torch.ones(keys, dtype=torch.bool, device=device)
    other[index] = False  # no vertical line
    out = torch.empty(queries, value.shape[-1], device=device)
    masks = [_band(slash, low, high, plan.block) for low, high in plan.bands]
    for start in range(past, keys, plan.block):
        stop = min(keys, start + plan.block)
        rows = stop - start
        parts = plan.parts(start, stop)
        lone = [offset for offset in plan.lone if offset < stop]
        width = sum(until - first + end - begin for first, until, begin, end in parts) + len(lone)
        scores = torch.empty(rows, width, device=device)
        q, held = query[start - past : stop - past], 0
        pieces: list[tuple[Tensor, Tensor]] = []
        for number, (first, until, begin, end) in enumerate(parts, len(plan.bands) - len(parts)):
            if until > first:
                piece = scores[:, held : held + until - first]
                torch.mm(q, some_keys[first:until].T, out=piece)
                pieces.append((piece, some_values[first:until]))
                held += until - first
            piece = scores[:, held : held + end - begin]
            torch.mm(q, key[begin:end].T, out=piece)
            low, high = plan.bands[number]
            off, shift = masks[number], begin - (start - high)
            blocked = off[:rows, shift : shift + end - begin] & other[begin:end]
            if low == 0:
                blocked = blocked | _future(rows, end - begin, device)
            piece.masked_fill_(blocked, -torch.inf)
            pieces.append((piece, value[begin:end]))
            held += end - begin
        for column, offset in enumerate(lone, held):
            begin = max(0, offset - start)  # rows before it have no such key
            at = slice(start + begin - offset, stop - offset)
            scores[:begin, column] = -torch.inf
            # Cells on vertical lines are there already.
            scores[begin:, column] = (q[begin:] * key[at]).sum(1).masked_fill_(~other[at], -torch.inf)
        torch.softmax(scores, -1, out=scores)
        block = out[start - past : stop - past].zero_()
        for piece, values in pieces:
            block.addmm_(piece, values)
        for column, offset in enumerate(lone, held):
            begin = max(0, offset - start)
            block[begin:].addcmul_(scores[begin:, column, None], value[start + begin - offset : stop - offset])
    return out


def _band(slash: Tensor, low: int, high: int, block: int) -> Tensor:
    """Cells on no slash line of the band: `[row column]`, for a range that begins `high` before the block."""
    index = torch.arange(block, device=slash.device)[:, None] + high
    index = index - torch.arange(high - low + block, device=slash.device)
    inside = (index >= low) & (index <= high)
    return ~(slash[index.clamp(0, len(slash) - 1)] & inside)


def _future(rows: int, columns: int, device: torch.device) -> Tensor:
    """The last columns are the queries themselves."""
    return torch.ones(rows, columns, dtype=torch.bool, device=device).triu(columns - rows + 1)


def _dense(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Plain causal attention; with four dimensions, for others PyTorch builds the whole matrix."""
    queries, keys = len(query), len(key)
    q, k, v = query[None, None], key[None, None], value[None, None]
    if queries == keys:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)[0, 0]
    outputs: list[Tensor] = []
    for start in range(0, queries, 1024):
        stop = min(queries, start + 1024)
        end = keys - queries + stop
        mask = ~_future(stop - start, end, query.device)
        some = (q[:, :, start:stop], k[:, :, :end], v[:, :, :end])
        outputs.append(scaled_dot_product_attention(*some, attn_mask=mask, scale=scaling)[0, 0])
    return torch.cat(outputs)
