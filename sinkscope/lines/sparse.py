"""Attention that computes only chosen lines (after MInference, Jiang et al. 2024).

On a GPU, one Triton kernel computes all heads (`triton.py`), or FlexAttention if that fails (`flex.py`).
Elsewhere each head is computed separately, block by block of queries. A block of queries needs three kinds of keys: the
columns of the vertical lines, gathered once per head; for every group of neighbouring offsets a band, which for these
queries is a range of keys; and for each lone offset one key per row. Columns inside a band's range are computed with
the band and left out of the gathered ones, so no cell is counted twice; one softmax runs over all parts.

The cost of all this is known beforehand. If it exceeds `dense_above` of dense attention, the head is computed densely.
"""

from __future__ import annotations

import importlib
import warnings
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.lines import flex
from sinkscope.lines.choice import HeadLines
from sinkscope.lines.lone import Lone, lone

Kernel = Literal["auto", "blocks", "flex", "triton"]
_BLOCKS_LIMIT, _GPU_LIMIT, _NARROW = 0.65, 0.5, 48
BLOCKS = (64, 128, 256)
"""Queries at a time; for each head the cheapest is taken."""
PART = 2000  # cells whose product takes as long as the overhead of one more matrix product
_BLOCK = 28000  # cells whose product takes as long as the overhead of one more block
_Three = tuple[Tensor, Tensor, Tensor]


def dense_limit(width: int, kernel: Kernel, device: torch.device) -> float:
    """Share of computed cells above which plain attention is about as fast, measured on a CPU in float32.

    The limit is lower for heads narrower than 48, whose dense attention is cheaper, and for FlexAttention, whose masks
    cost time in every block. The same limit is used for Triton, for which it was not measured.
    """
    return _GPU_LIMIT if _fast(kernel, device) else _BLOCKS_LIMIT * min(1.0, width / _NARROW)


def _fast(kernel: Kernel, device: torch.device) -> tuple[Kernel, ...]:
    """Kernels to try before the loop over blocks, in this order; the only place that decides it."""
    if kernel in ("blocks", "flex"):
        return ("flex",) if kernel == "flex" else ()
    if device.type == "cuda":
        return "triton", "flex"
    return ("triton",) if kernel == "triton" else ()


def missing(
    kernel: Kernel, query: Float[Tensor, "head query d_head"], value: Float[Tensor, "kv_head key d_value"]
) -> str | None:
    """Why only the loop over blocks can compute lines of these inputs; None if another kernel can."""
    why: str | None = "not asked for"
    for name in _fast(kernel, query.device) or (("flex",) if kernel == "auto" else ()):
        why = _why_not(name, query, value)
        if why is None:
            return None
    return why


def _why_not(name: Kernel, query: Tensor, value: Tensor) -> str | None:
    if name == "triton":
        made = _triton()
        return "triton is not installed" if made is None else made.why_not(query, value)
    return flex.why_not(query, value) if name == "flex" else None


@cache
def _triton() -> Any:
    """The module with the kernel; None if it cannot be imported, with one warning."""
    try:
        return importlib.import_module("sinkscope.lines.triton")
    except ImportError as error:
        warnings.warn(f"lines are not computed by Triton: {error}", stacklevel=2)
    return None


@dataclass(frozen=True)
class Sparsity:
    """What sparse attention did in every head of a layer.

    Attributes:
        cells: Share of the causal cells that lie on the lines.
        computed: Cost as a share of the causal cells: cells that were computed, or take as long; 1.0 if dense.
        dense: Whether the head was computed by plain attention, because that is faster.
        kernel: What computed the other heads: "blocks", "blocks, lone lines not compiled", "flex" or "triton".
    """

    cells: tuple[float, ...]
    computed: tuple[float, ...]
    dense: tuple[bool, ...]
    kernel: str = "blocks"


def check_kernel(kernel: str) -> None:
    """Refuse an unknown kernel.

    Raises:
        SinkscopeError: It is not one of `Kernel`.
    """
    if kernel not in get_args(Kernel):
        raise SinkscopeError(f'kernel={kernel!r}: expected "auto", "blocks", "flex" or "triton"')


def sparse_attention(
    query: Float[Tensor, "head query d_head"],
    key: Float[Tensor, "kv_head key d_head"],
    value: Float[Tensor, "kv_head key d_value"],
    lines: HeadLines,
    *,
    scaling: float | None = None,
    dense_above: float | None = None,
    kernel: Kernel = "auto",
) -> tuple[Float[Tensor, "head query d_value"], Sparsity]:
    """Causal attention on the lines of every head; the queries are at the last positions.

    Args:
        query: Queries of the new tokens, after rotary.
        key: Keys of all positions, after rotary; query heads share them in groups.
        value: Values of all positions.
        lines: Chosen lines of every query head. The main diagonal must be among them.
        scaling: Factor on the scores; None: one over the root of `d_head`.
        dense_above: Share of computed cells above which a head is computed densely, with all its cells. None:
            `dense_limit`, which is 0.65 in blocks, less for narrow heads, and 0.5 with Triton and FlexAttention.
        kernel: "blocks": a loop over blocks of queries; "triton": a kernel for CUDA that computes columns, blocks and
            single offsets; "flex": FlexAttention in blocks of 128 by 128, compiled in the first call (10 to 20 s);
            "auto": on CUDA "triton", else "blocks". Where Triton is not available, "flex" is used on CUDA, and where
            that is not available "blocks"; a warning says so once.

    Returns:
        The output, in the dtype of `value`, computed in float32 (Triton and FlexAttention compute in the inputs' dtype
        and accumulate in float32); and what was computed.

    Raises:
        SinkscopeError: Lines have the wrong shape, a head lacks the main diagonal, or the kernel is unknown.
        UnsupportedError: An input requires gradients.
    """
    tensors = (query, key, value)
    _check(tensors, lines)
    check_kernel(kernel)
    scaling = float(query.shape[-1] ** -0.5) if scaling is None else scaling
    for name in (*_fast(kernel, query.device), "blocks"):
        if _why_not(name, query, value) is not None:
            continue
        limit = dense_limit(query.shape[-1], name, query.device) if dense_above is None else dense_above
        said, costs, compute = _PLANNERS[name](tensors, lines, scaling, limit)
        dense = tuple(cost is None or cost > limit for cost in costs)
        computed = tuple(1.0 if full or cost is None else cost for full, cost in zip(dense, costs, strict=True))
        out = torch.empty(*query.shape[:2], value.shape[-1], device=query.device, dtype=value.dtype)
        if compute([head for head, full in enumerate(dense) if not full], out):
            _dense(tensors, [head for head, full in enumerate(dense) if full], scaling, out)
            return out, Sparsity(tuple(lines.density().tolist()), computed, dense, said)
    raise RuntimeError("the loop over blocks computes every head")


def dense_in_all(query: Tensor, value: Tensor, lines: HeadLines, limit: float, kernel: Kernel) -> Sparsity | None:
    """What `sparse_attention` would report if all lines are chosen, so that every head is dense; otherwise None.

    Args:
        query: As for `sparse_attention`.
        value: As for `sparse_attention`.
        lines: Lines of every head.
        limit: Share of computed cells above which a head is dense.
        kernel: As for `sparse_attention`.
    """
    if limit >= 1 or not bool(lines.vertical.all()):
        return None
    heads = len(query)
    fast = next((name for name in _fast(kernel, query.device) if _why_not(name, query, value) is None), None)
    said = fast or _said_of_blocks(lone(query.shape[-1], value.shape[-1], query.device))
    return Sparsity((1.0,) * heads, (1.0,) * heads, (True,) * heads, said)


def _said_of_blocks(by: Lone) -> str:
    return "blocks" if by.compiled else "blocks, lone lines not compiled"


def _check(tensors: _Three, lines: HeadLines) -> None:
    query, key, value = tensors
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise UnsupportedError(
            "attention along lines has no gradients: call it, or the model, under torch.no_grad()", page="kv-session"
        )
    heads, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    if not keys or heads % len(key) or key.shape[:2] != value.shape[:2] or query.shape[-1] != key.shape[-1]:
        raise SinkscopeError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}: expected keys and values "
            "of the same heads and positions, as wide as queries, whose heads share them in equal groups"
        )
    if lines.vertical.shape != (heads, keys) or lines.queries != queries or not bool(lines.slash[:, 0].all()):
        raise SinkscopeError(
            f"lines of {tuple(lines.vertical.shape)} with {lines.queries} queries for {heads} heads, {queries} queries "
            f"and {keys} keys: expected lines of this shape, the main diagonal among them"
        )


_Planned = tuple[str, list[float | None], Callable[[list[int], Tensor], bool]]
"""Kernel in words, cost of each head as a share of all cells (None: not planned), and what computes some heads."""


def _triton_planner(tensors: _Three, lines: HeadLines, scaling: float, dense_above: float) -> _Planned:
    query, kernel = tensors[0], _triton()
    index = kernel.index_of(lines, kernel.queries_at_once(tensors[2].dtype))

    def compute(heads: list[int], out: Tensor) -> bool:
        some = torch.tensor(heads, dtype=torch.long, device=query.device)
        return not heads or kernel.triton_heads(*tensors, lines, index, some, scaling, out)

    return "triton", (index.cells() / int(lines.lengths().sum())).tolist(), compute


def _flex_planner(tensors: _Three, lines: HeadLines, scaling: float, dense_above: float) -> _Planned:
    blocks = flex.blocks_of(lines)

    def compute(heads: list[int], out: Tensor) -> bool:
        if not heads:
            return True
        some = torch.tensor(heads, device=out.device)
        made = flex.flex_heads(*tensors, lines, blocks.only(some), scaling)
        if made is not None:
            out[some] = made[some].to(out.dtype)
        return made is not None

    return "flex", (blocks.cells() / int(lines.lengths().sum())).tolist(), compute


def _blocks_planner(tensors: _Three, lines: HeadLines, scaling: float, dense_above: float) -> _Planned:
    query, key, value = tensors
    groups, every = len(query) // len(key), int(lines.lengths().sum())
    by = lone(query.shape[-1], value.shape[-1], query.device)
    # Lines that fill more than the limit already need no plan.
    plans = [
        plan_of(lines, head, by.cost) if cells <= dense_above else None
        for head, cells in enumerate(lines.density().tolist())
    ]

    def one(head: int, out: Tensor) -> None:
        q, k, v = query[head].float() * scaling, key[head // groups].float(), value[head // groups].float()
        plan = plans[head]
        assert plan is not None
        out[head] = _head_in_blocks(q.contiguous(), k.contiguous(), v.contiguous(), lines, head, plan, by)

    def compute(heads: list[int], out: Tensor) -> bool:
        _side_by_side(lambda head: one(head, out), heads, query.device)
        return True

    return _said_of_blocks(by), [None if plan is None else plan.cost / every for plan in plans], compute


_PLANNERS = {"triton": _triton_planner, "flex": _flex_planner, "blocks": _blocks_planner}


def _side_by_side(compute: Callable[[int], None], heads: list[int], device: torch.device) -> None:
    """Compute each head in its own thread, because the matrix products of one head are too small to split."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or min(threads, len(heads)) < 2:
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


def _dense(tensors: _Three, heads: list[int], scaling: float, out: Tensor) -> None:
    """Plain causal attention of some heads, on 4-D tensors: for other shapes PyTorch builds the whole matrix."""
    if not heads:
        return
    query, key, value = tensors
    index: Any = slice(None)
    if len(heads) < len(query):
        index = torch.tensor(heads, device=query.device)
        of_head = index // (len(query) // len(key))
        query, key, value = query[index], key[of_head], value[of_head]
    q, k, v = query[None].to(value.dtype), key[None].to(value.dtype), value[None]
    queries, keys, grouped = q.shape[2], k.shape[2], len(query) > len(key)
    if queries == keys:
        out[index] = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)[0]
        return
    for start in range(0, queries, 1024):
        stop = min(queries, start + 1024)
        end = keys - queries + stop
        mask = torch.ones(stop - start, end, dtype=torch.bool, device=q.device).tril(end - (stop - start))
        some = (q[:, :, start:stop], k[:, :, :end], v[:, :, :end])
        made = scaled_dot_product_attention(*some, attn_mask=mask, scale=scaling, enable_gqa=grouped)
        out[index, start:stop] = made[0]


@dataclass(frozen=True, eq=False)
class Plan:
    """How one head is computed.

    Attributes:
        block: Number of queries at a time.
        bands: (lowest, highest) offset of each band, highest offsets first.
        lone: Offsets that are computed row by row, ascending.
        cost: Number of cells that are computed, or take as long, without the fixed cost of each block.
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
        plans.append((cost + float(PART * parts.sum()) + _BLOCK * len(start), Plan(block, bands, alone, cost)))
        if lines.queries <= block:
            break
    return min(plans, key=lambda plan: plan[0])[1]


def bands_of(offsets: list[int], block: int, lone_cost: float) -> tuple[list[tuple[int, int]], list[int]]:
    """Divide offsets into bands (highest offsets first) and lone offsets at the lowest cost.

    A band takes as many columns as it spans, plus one block. Two bands are more than a block apart, because otherwise
    one band would be cheaper; so no key lies in the ranges of both.
    """
    opening = block + PART / block
    runs: list[tuple[int, int]] = []
    for offset in offsets:
        if runs and offset == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], offset)
        else:
            runs.append((offset, offset))
    # The cheapest division of the runs so far whose last run is lone, and the cheapest whose last run is in a band: its
    # cost, and its parts from the last to the first as nested pairs ((lowest, highest, is a band), parts before).
    alone: tuple[float, Any] = (0.0, None)
    banded: tuple[float, Any] = (float("inf"), None)
    for low, high in runs:
        cost, parts = min(alone, banded, key=lambda division: division[0])
        alone = (cost + lone_cost * (high - low + 1), ((low, high, False), parts))
        new = (cost + opening + high - low, ((low, high, True), parts))
        if banded[1] is not None:
            (first, end, _), earlier = banded[1]
            banded = (banded[0] + high - end, ((first, high, True), earlier))
        banded = min(new, banded, key=lambda division: division[0])
    parts = min(alone, banded, key=lambda division: division[0])[1]
    bands: list[tuple[int, int]] = []
    single: list[int] = []
    while parts is not None:
        (low, high, is_band), parts = parts
        if is_band:
            bands.append((low, high))
        else:
            single.extend(range(high, low - 1, -1))
    return bands, single[::-1]


def _head_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, lines: HeadLines, head: int, plan: Plan, by: Lone
) -> Tensor:
    """Attention of one head, block by block; `query` is already scaled."""
    queries, keys = len(query), len(key)
    past, device = keys - queries, key.device
    columns = lines.vertical[head].nonzero().flatten()
    some_keys, some_values = key.index_select(0, columns), value.index_select(0, columns)
    open_keys = torch.ones(keys, dtype=torch.bool, device=device)
    open_keys[columns] = False  # no vertical line
    before = pad(open_keys.logical_not().cumsum(0), (1, 0)).tolist()  # columns before each key
    out = torch.empty(queries, value.shape[-1], device=device)
    masks = {band: _band(lines.slash[head], *band, plan.block) for band in plan.bands}
    lone_offsets = torch.tensor(plan.lone, dtype=torch.long, device=device)
    for start in range(past, keys, plan.block):
        stop = min(keys, start + plan.block)
        rows, taken, count = stop - start, 0, bisect_left(plan.lone, stop)
        pieces: list[tuple[Tensor, Tensor]] = []  # keys and values
        hidden: list[tuple[int, Tensor]] = []  # which cells not to see, from a column on
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
    """Cells on no slash line of the band, or in the future: `[row column]`, for keys from `high` before the block."""
    index = torch.arange(block, device=slash.device)[:, None] + high
    index = index - torch.arange(high - low + block, device=slash.device)
    inside = (index >= low) & (index <= high)
    return ~(slash[index.clamp(0, len(slash) - 1)] & inside), index < 0
