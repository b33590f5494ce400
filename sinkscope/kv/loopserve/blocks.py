"""One head on its lines, block by block of queries, on any device (after MInference, Jiang et al. 2024).

A block of queries needs three kinds of keys: the columns of the vertical lines, gathered once per head; for every
group of neighbouring offsets a band, which for these queries is a range of keys; and for lone offsets one key in each
row. Columns inside of a band's range are computed with the band and left out of the gathered ones, so no cell is
counted twice; one softmax runs over all parts. What all this costs is known before.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.kv.loopserve.lines import HeadLines
from sinkscope.kv.loopserve.lone import Lone

BLOCKS = (64, 128, 256)
"""Queries at a time; the cheapest is taken, head by head."""
_PART = 2000  # cells whose product takes as long as the overhead of one more matrix product
_BLOCK = 28000  # and of one more block


@dataclass(frozen=True, eq=False)
class Plan:
    """How one head is computed.

    Attributes:
        block: queries at a time.
        bands: (lowest, highest) offset of each, highest offsets first.
        lone: offsets that are computed row by row, in rising order.
        cost: cells that are computed, or take as long, without what a block costs whatever is in it.
    """

    block: int
    bands: list[tuple[int, int]]
    lone: list[int]
    cost: float


def plan_of(lines: HeadLines, head: int, lone_cost: float) -> Plan:
    """The cheapest way to compute a head, if a lone line takes as long as `lone_cost` columns."""
    offsets = lines.slash[head].nonzero().flatten().tolist()
    before = pad(lines.vertical[head].cpu().cumsum(0), (1, 0))  # columns before each key
    keys, past = lines.vertical.shape[1], lines.past
    plans: list[tuple[float, Plan]] = []
    for block in BLOCKS:
        bands, alone = bands_of(offsets, block, lone_cost)
        start = torch.arange(past, keys, block)
        stop = (start + block).clamp(max=keys)
        width, parts = before[stop], torch.ones_like(start)
        for low, high in bands:
            begin, end = (start - high).clamp(min=0), (stop - low).clamp(min=0)
            width = width + (end - begin) - (before[end] - before[begin])
            parts += end > 0
        rows = sum(min(keys - offset, lines.queries) for offset in alone)
        cost = float(((stop - start) * width).sum()) + lone_cost * rows
        plans.append((cost + float(_PART * parts.sum()) + _BLOCK * len(start), Plan(block, bands, alone, cost)))
        if lines.queries <= block:
            break
    return min(plans, key=lambda plan: plan[0])[1]


def bands_of(offsets: list[int], block: int, lone_cost: float) -> tuple[list[tuple[int, int]], list[int]]:
    """Which offsets to take together, as ranges with the highest first, and which one by one: what is cheapest.

    A band takes as many columns as it spans, and a block more. Two bands are more than a block apart, or it would have
    been cheaper to go on, so no key is in the ranges of both.
    """
    opening = block + _PART / block
    runs: list[tuple[int, int]] = []
    for offset in offsets:
        if runs and offset == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], offset)
        else:
            runs.append((offset, offset))
    # Cheapest cost up to a run that is alone, and that is in a band; whether the run before it was in one then, and
    # whether its band is the same.
    alone, banded, end = 0.0, float("inf"), 0
    steps: list[tuple[bool, bool]] = []
    for low, high in runs:
        new, on = min(alone, banded) + opening + high - low, banded + high - end
        steps.append((banded < alone, on < new))
        alone, banded, end = min(alone, banded) + lone_cost * (high - low + 1), min(new, on), high
    bands: list[tuple[int, int]] = []
    single: list[int] = []
    in_band, goes_on = banded < alone, False
    for (low, high), (before_in_band, on) in zip(reversed(runs), reversed(steps), strict=True):
        if not in_band:
            single.extend(range(high, low - 1, -1))
        elif goes_on:
            bands[-1] = (low, bands[-1][1])
        else:
            bands.append((low, high))
        goes_on = in_band and on
        in_band = goes_on or before_in_band
    return bands, single[::-1]


def head_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, columns: Tensor, slash: Tensor, plan: Plan, by: Lone
) -> Tensor:
    """One head, block by block; `query` is scaled."""
    queries, keys = len(query), len(key)
    past, device = keys - queries, key.device
    some_keys, some_values = key.index_select(0, columns), value.index_select(0, columns)
    open_keys = torch.ones(keys, dtype=torch.bool, device=device)
    open_keys[columns] = False  # no vertical line
    before = pad(open_keys.logical_not().cumsum(0), (1, 0)).tolist()  # columns before each key
    out = torch.empty(queries, value.shape[-1], device=device)
    masks = {band: _band(slash, *band, plan.block) for band in plan.bands}
    lone_offsets = torch.tensor(plan.lone, dtype=torch.long, device=device)
    for start in range(past, keys, plan.block):
        stop = min(keys, start + plan.block)
        rows, taken, count = stop - start, 0, bisect_left(plan.lone, stop)
        pieces: list[tuple[Tensor, Tensor]] = []  # keys and values
        hidden: list[tuple[int, Tensor]] = []  # what not to see, from a column on
        held = count
        for low, high in plan.bands:
            begin, end = max(0, start - high), stop - low
            if end <= 0:
                continue
            if before[begin] > taken:
                pieces.append((some_keys[taken : before[begin]], some_values[taken : before[begin]]))
                held += before[begin] - taken
            shift = begin - (start - high)
            off, future = (mask[:rows, shift : shift + end - begin] for mask in masks[low, high])
            hidden.append((held, off & open_keys[begin:end] | future))
            pieces.append((key[begin:end], value[begin:end]))
            held, taken = held + end - begin, before[end]
        if before[stop] > taken:
            pieces.append((some_keys[taken : before[stop]], some_values[taken : before[stop]]))
            held += before[stop] - taken
            late = columns[max(taken, before[start]) : before[stop]]
            at = torch.arange(start, stop, device=device)
            hidden.append((held - len(late), late > at[:, None]))
        q, scores = query[start - past : stop - past], torch.empty(rows, held, device=device)
        held = count
        for keys_of, _ in pieces:
            torch.mm(q, keys_of.T, out=scores[:, held : held + len(keys_of)])
            held += len(keys_of)
        for first, off in hidden:
            scores[:, first : first + off.shape[1]].masked_fill_(off, -torch.inf)
        if count:  # cells on vertical lines are there already
            by.scores(q, key, open_keys, lone_offsets[:count], start, scores)
        torch.softmax(scores, -1, out=scores)
        block, held = out[start - past : stop - past].zero_(), count
        for _, values_of in pieces:
            block.addmm_(scores[:, held : held + len(values_of)], values_of)
            held += len(values_of)
        if count:
            by.sums(scores, value, lone_offsets[:count], start, block)
    return out


def _band(slash: Tensor, low: int, high: int, block: int) -> tuple[Tensor, Tensor]:
    """Cells on no slash line of the band, and in the future: `[row column]`, for keys from `high` before the block."""
    index = torch.arange(block, device=slash.device)[:, None] + high
    index = index - torch.arange(high - low + block, device=slash.device)
    inside = (index >= low) & (index <= high)
    return ~(slash[index.clamp(0, len(slash) - 1)] & inside), index < 0
