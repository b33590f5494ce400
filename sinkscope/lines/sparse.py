"""Attention that computes only chosen lines (after MInference, Jiang et al. 2024).

On CUDA, one Triton kernel computes all heads (`triton.py`). Elsewhere each head is computed separately, block by block
of queries. A block of queries needs three kinds of keys: the columns of the vertical lines, gathered once per head; for
every group of neighbouring offsets a band, which for these queries is a range of keys; and for each lone offset one key
per row. Columns inside a band's range are computed with the band and left out of the gathered ones, so no cell is
counted twice; one softmax runs over all parts.

The cost of all this is known beforehand. If it exceeds `dense_above` of dense attention, the head is computed densely.
"""

from __future__ import annotations

import importlib
import math
import warnings
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.lines.choice import HeadLines
from sinkscope.lines.lone import LoneLoops, lone_loops

Kernel = Literal["auto", "blocks", "triton"]
CPU_LIMIT = 0.65
CUDA_LIMIT = 0.5
NARROW = 48
BLOCKS = (64, 128, 256)
"""Queries at a time; for each head the cheapest is taken."""
PART = 2000  # cells whose product takes as long as the overhead of one more matrix product
_BLOCK = 28000  # cells whose product takes as long as the overhead of one more block


def dense_limit(width: int, kernel: Kernel, device: torch.device) -> float:
    """Share of computed cells above which plain attention is about as fast, measured on a CPU in float32.

    The limit is lower for heads narrower than 48, whose dense attention is cheaper, and for Triton, for which it was
    not measured.
    """
    if _wants_triton(kernel, device):
        return CUDA_LIMIT
    return CPU_LIMIT * min(1.0, width / NARROW)


def missing(
    kernel: Kernel, query: Float[Tensor, "head query d_head"], value: Float[Tensor, "kv_head key d_value"]
) -> str | None:
    """Why only the loop over blocks can compute lines of these inputs; None if Triton can."""
    if not _wants_triton(kernel, query.device):
        return f"kernel {kernel!r} does not use it on {query.device.type}"
    module = _triton()
    if module is None:
        return "triton is not installed"
    return module.why_not(query, value)


def _wants_triton(kernel: Kernel, device: torch.device) -> bool:
    return kernel == "triton" or (kernel == "auto" and device.type == "cuda")


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
        kernel: What computed the other heads: "blocks", "blocks, lone lines not compiled" or "triton".
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
        raise SinkscopeError(f'kernel={kernel!r}: expected "auto", "blocks" or "triton"')


@dataclass(frozen=True, eq=False)
class _Inputs:
    """What attention is computed from."""

    query: Float[Tensor, "head query d_head"]
    key: Float[Tensor, "kv_head key d_head"]
    value: Float[Tensor, "kv_head key d_value"]
    scaling: float

    @property
    def group(self) -> int:
        """Number of query heads that share a kv head."""
        return len(self.query) // len(self.key)


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
            `dense_limit`, which is 0.65 in blocks, less for narrow heads, and 0.5 with Triton.
        kernel: "blocks": a loop over blocks of queries; "triton": a kernel for CUDA that computes columns, blocks and
            single offsets; "auto": on CUDA "triton", else "blocks". Where Triton is not available, "blocks" is used,
            and a warning says so once.

    Returns:
        The output, in the dtype of `value`, computed in float32 (Triton computes in the inputs' dtype and accumulates
        in float32); and what was computed.

    Raises:
        SinkscopeError: Lines have the wrong shape, a head lacks the main diagonal, or the kernel is unknown.
        UnsupportedError: An input requires gradients.
    """
    check_kernel(kernel)
    if scaling is None:
        scaling = float(query.shape[-1] ** -0.5)
    _check(query, key, value, lines)
    inputs = _Inputs(query, key, value, scaling)
    out = torch.empty(*query.shape[:2], value.shape[-1], device=query.device, dtype=value.dtype)
    sparsity = None
    if missing(kernel, query, value) is None:
        limit = CUDA_LIMIT
        if dense_above is not None:
            limit = dense_above
        sparsity = _by_triton(inputs, lines, limit, out)
    if sparsity is None:
        limit = dense_above
        if limit is None:
            limit = dense_limit(query.shape[-1], "blocks", query.device)
        sparsity = _in_blocks(inputs, lines, limit, out)
    dense_heads = [head for head, dense in enumerate(sparsity.dense) if dense]
    _dense(inputs, dense_heads, out)
    return out, sparsity


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
    used = "triton"
    if missing(kernel, query, value) is not None:
        used = _name_of_blocks(lone_loops(query.shape[-1], value.shape[-1], query.device))
    return Sparsity((1.0,) * heads, (1.0,) * heads, (True,) * heads, used)


def _name_of_blocks(loops: LoneLoops) -> str:
    if loops.compiled:
        return "blocks"
    return "blocks, lone lines not compiled"


def _check(query: Tensor, key: Tensor, value: Tensor, lines: HeadLines) -> None:
    learned = query.requires_grad or key.requires_grad or value.requires_grad
    if learned and torch.is_grad_enabled():
        raise UnsupportedError(
            "attention along lines has no gradients: call it, or the model, under torch.no_grad()", page="kv-session"
        )
    heads = query.shape[0]
    queries = query.shape[1]
    keys = key.shape[1]
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


def _by_triton(inputs: _Inputs, lines: HeadLines, limit: float, out: Tensor) -> Sparsity | None:
    """Write the heads that are not dense into `out`; None if the kernel could not be compiled."""
    module = _triton()
    index = module.index_of(lines, module.queries_at_once(inputs.value.dtype))
    costs = (index.cells() / int(lines.lengths().sum())).tolist()
    sparse_heads = [head for head, cost in enumerate(costs) if cost <= limit]
    if sparse_heads:
        heads = torch.tensor(sparse_heads, dtype=torch.long, device=out.device)
        compiled = module.triton_heads(inputs.query, inputs.key, inputs.value, lines, index, heads, inputs.scaling, out)
        if not compiled:
            return None
    return _sparsity(lines, costs, limit, "triton")


def _sparsity(lines: HeadLines, costs: list[float], limit: float, kernel: str) -> Sparsity:
    """What was done if heads whose cost exceeds the limit are dense."""
    dense = [cost > limit for cost in costs]
    computed = [1.0 if cost > limit else cost for cost in costs]
    return Sparsity(tuple(lines.density().tolist()), tuple(computed), tuple(dense), kernel)


def _in_blocks(inputs: _Inputs, lines: HeadLines, limit: float, out: Tensor) -> Sparsity:
    """Write the heads that are not dense into `out`, block by block of queries."""
    loops = lone_loops(inputs.query.shape[-1], inputs.value.shape[-1], out.device)
    cells = int(lines.lengths().sum())
    costs: list[float] = []
    plans: dict[int, Plan] = {}
    for head, density in enumerate(lines.density().tolist()):
        cost = math.inf  # lines that fill more than the limit already need no plan
        if density <= limit:
            plan = plan_of(lines, head, loops.cost)
            cost = plan.cost / cells
            if cost <= limit:
                plans[head] = plan
        costs.append(cost)

    def compute(head: int) -> None:
        blocked = _BlockedHead.of(inputs, lines, head, plans[head], loops)
        out[head] = blocked.attention(inputs.query[head].float() * inputs.scaling)

    _side_by_side(compute, list(plans), out.device)
    return _sparsity(lines, costs, limit, _name_of_blocks(loops))


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


def _dense(inputs: _Inputs, heads: list[int], out: Tensor) -> None:
    """Plain causal attention of some heads, on 4-D tensors: for other shapes PyTorch builds the whole matrix."""
    if not heads:
        return
    query = inputs.query
    key = inputs.key
    value = inputs.value
    index: Any = slice(None)
    if len(heads) < len(query):
        index = torch.tensor(heads, device=query.device)
        kv_heads = index // inputs.group
        query = query[index]
        key = key[kv_heads]
        value = value[kv_heads]
    q = query[None].to(value.dtype)
    k = key[None].to(value.dtype)
    v = value[None]
    queries = q.shape[2]
    keys = k.shape[2]
    grouped = len(query) > len(key)
    if queries == keys:
        whole = scaled_dot_product_attention(q, k, v, is_causal=True, scale=inputs.scaling, enable_gqa=grouped)
        out[index] = whole[0]
        return
    for start in range(0, queries, 1024):
        stop = min(queries, start + 1024)
        end = keys - queries + stop
        seen = torch.ones(stop - start, end, dtype=torch.bool, device=q.device).tril(end - (stop - start))
        part = scaled_dot_product_attention(
            q[:, :, start:stop],
            k[:, :, :end],
            v[:, :, :end],
            attn_mask=seen,
            scale=inputs.scaling,
            enable_gqa=grouped,
        )
        out[index, start:stop] = part[0]


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
    columns_before = pad(lines.vertical[head].cpu().cumsum(0), (1, 0))
    keys = lines.vertical.shape[1]
    best: Plan | None = None
    best_time = math.inf
    for block in BLOCKS:
        bands, lone_offsets = bands_of(offsets, block, lone_cost)
        start = torch.arange(lines.past, keys, block)
        stop = (start + block).clamp(max=keys)
        width = columns_before[stop]
        parts = torch.ones_like(start)
        for low, high in bands:
            begin = (start - high).clamp(min=0)
            end = (stop - low).clamp(min=0)
            width = width + (end - begin) - (columns_before[end] - columns_before[begin])
            parts += end > 0
        lone_rows = sum(min(keys - offset, lines.queries) for offset in lone_offsets)
        cost = float(((stop - start) * width).sum()) + lone_cost * lone_rows
        time = cost + float(PART * parts.sum()) + _BLOCK * len(start)
        if time < best_time:
            best = Plan(block, bands, lone_offsets, cost)
            best_time = time
        if lines.queries <= block:
            break
    assert best is not None
    return best


@dataclass(frozen=True)
class _Run:
    """Neighbouring offsets, computed as a band or each alone, and the runs before them."""

    low: int
    high: int
    is_band: bool
    before: _Run | None


def bands_of(offsets: list[int], block: int, lone_cost: float) -> tuple[list[tuple[int, int]], list[int]]:
    """Divide offsets into bands (highest offsets first) and lone offsets at the lowest cost.

    A band takes as many columns as it spans, plus one block. Two bands are more than a block apart, because otherwise
    one band would be cheaper; so no key lies in the ranges of both.
    """
    opening = block + PART / block
    # The cheapest division of the runs so far whose last run is lone, and the cheapest whose last run is in a band.
    lone_last: _Run | None = None
    band_last: _Run | None = None
    lone_price = 0.0
    band_price = math.inf
    for low, high in _neighbours(offsets):
        earlier = lone_last
        price = lone_price
        if band_price < lone_price:
            earlier = band_last
            price = band_price
        new_band = _Run(low, high, True, earlier)
        new_price = price + opening + high - low
        lone_last = _Run(low, high, False, earlier)
        lone_price = price + lone_cost * (high - low + 1)
        if band_last is not None:
            longer_price = band_price + high - band_last.high
            if longer_price < new_price:
                new_band = _Run(band_last.low, high, True, band_last.before)
                new_price = longer_price
        band_last = new_band
        band_price = new_price
    run = band_last
    if lone_price <= band_price:
        run = lone_last
    bands: list[tuple[int, int]] = []
    lone_offsets: list[int] = []
    while run is not None:
        if run.is_band:
            bands.append((run.low, run.high))
        else:
            lone_offsets.extend(range(run.high, run.low - 1, -1))
        run = run.before
    return bands, lone_offsets[::-1]


def _neighbours(offsets: list[int]) -> list[tuple[int, int]]:
    """(lowest, highest) of every run of consecutive offsets."""
    runs: list[tuple[int, int]] = []
    for offset in offsets:
        if runs and offset == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], offset)
        else:
            runs.append((offset, offset))
    return runs


@dataclass(frozen=True, eq=False)
class _Piece:
    """Keys and values that a block of queries needs; `hidden` cells, among the last of them, are not seen."""

    key: Float[Tensor, "column d_head"]
    value: Float[Tensor, "column d_value"]
    hidden: Bool[Tensor, "row last_column"] | None = None


@dataclass(frozen=True, eq=False)
class _BlockedHead:
    """One head, ready to be computed block by block.

    Attributes:
        key: Keys of all positions.
        value: Values of all positions.
        columns: Vertical lines, ascending.
        column_key: Keys of the vertical lines.
        column_value: Values of the vertical lines.
        columns_before: Number of vertical lines before each key.
        no_column: Whether a key lies on no vertical line.
        bands: For every band the cells on none of its lines, and the cells in the future.
        plan: How the head is computed.
        loops: What computes lone lines.
    """

    key: Float[Tensor, "key d_head"]
    value: Float[Tensor, "key d_value"]
    columns: Int[Tensor, " column"]
    column_key: Float[Tensor, "column d_head"]
    column_value: Float[Tensor, "column d_value"]
    columns_before: list[int]
    no_column: Bool[Tensor, " key"]
    bands: list[tuple[Tensor, Tensor]]
    plan: Plan
    loops: LoneLoops

    @classmethod
    def of(cls, inputs: _Inputs, lines: HeadLines, head: int, plan: Plan, loops: LoneLoops) -> _BlockedHead:
        key = inputs.key[head // inputs.group].float().contiguous()
        value = inputs.value[head // inputs.group].float().contiguous()
        columns = lines.vertical[head].nonzero().flatten()
        return cls(
            key=key,
            value=value,
            columns=columns,
            column_key=key.index_select(0, columns),
            column_value=value.index_select(0, columns),
            columns_before=pad(lines.vertical[head].cumsum(0), (1, 0)).tolist(),
            no_column=~lines.vertical[head],
            bands=[_band(lines.slash[head], low, high, plan.block) for low, high in plan.bands],
            plan=plan,
            loops=loops,
        )

    def attention(self, query: Float[Tensor, "query d_head"]) -> Float[Tensor, "query d_value"]:
        """Attention of scaled queries at the last positions."""
        query = query.contiguous()
        keys = len(self.key)
        plan = self.plan
        past = keys - len(query)
        out = torch.zeros(len(query), self.value.shape[-1], device=query.device)
        lone_offsets = torch.tensor(plan.lone, dtype=torch.long, device=query.device)
        for start in range(past, keys, plan.block):
            stop = min(keys, start + plan.block)
            reaching = lone_offsets[: bisect_left(plan.lone, stop)]  # lone offsets that reach a key
            self._block(start, query[start - past : stop - past], reaching, out[start - past : stop - past])
        return out

    def _block(self, start: int, query: Tensor, lone_offsets: Tensor, out: Tensor) -> None:
        """Add the attention of the queries from position `start` on to zeros in `out`."""
        lone_count = len(lone_offsets)
        pieces = self._pieces(start, start + len(query))
        width = lone_count + sum(len(piece.key) for piece in pieces)
        scores = torch.empty(len(query), width, device=query.device)
        # In einops: "row d_head, column d_head -> row column", without a copy.
        end = lone_count
        for piece in pieces:
            begin = end
            end = end + len(piece.key)
            torch.mm(query, piece.key.T, out=scores[:, begin:end])
            if piece.hidden is not None:
                scores[:, end - piece.hidden.shape[1] : end].masked_fill_(piece.hidden, -torch.inf)
        if lone_count:  # cells on vertical lines are among the pieces
            self.loops.scores(query, self.key, self.no_column, lone_offsets, start, scores)
        torch.softmax(scores, -1, out=scores)
        end = lone_count
        for piece in pieces:
            begin = end
            end = end + len(piece.value)
            out.addmm_(scores[:, begin:end], piece.value)
        if lone_count:
            self.loops.sums(scores, self.value, lone_offsets, start, out)

    def _pieces(self, start: int, stop: int) -> list[_Piece]:
        """Columns and bands of a block of queries, by ascending keys."""
        pieces: list[_Piece] = []
        taken = 0  # columns that are in a piece
        for (low, high), (off_lines, future) in zip(self.plan.bands, self.bands, strict=True):
            begin = max(0, start - high)
            end = stop - low
            if end <= 0:
                continue
            count = self.columns_before[begin]
            if count > taken:
                pieces.append(_Piece(self.column_key[taken:count], self.column_value[taken:count]))
            shift = begin - (start - high)
            place = (slice(stop - start), slice(shift, shift + end - begin))
            hidden = off_lines[place] & self.no_column[begin:end] | future[place]
            pieces.append(_Piece(self.key[begin:end], self.value[begin:end], hidden))
            taken = self.columns_before[end]
        count = self.columns_before[stop]
        if count > taken:
            late = self.columns[max(taken, self.columns_before[start]) : count]
            rows = torch.arange(start, stop, device=late.device)
            hidden = late > rows[:, None]
            pieces.append(_Piece(self.column_key[taken:count], self.column_value[taken:count], hidden))
        return pieces


def _band(slash: Bool[Tensor, " key"], low: int, high: int, block: int) -> tuple[Tensor, Tensor]:
    """Cells on no slash line of the band, and cells in the future: `[row column]`, for keys from `high` before."""
    rows = torch.arange(block, device=slash.device)[:, None] + high
    offset = rows - torch.arange(high - low + block, device=slash.device)
    inside = (offset >= low) & (offset <= high)
    on_line = slash[offset.clamp(0, len(slash) - 1)] & inside
    return ~on_line, offset < 0
