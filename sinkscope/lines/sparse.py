"""Attention that computes only chosen lines (after MInference, Jiang et al. 2024).

On CUDA, one Triton kernel computes all heads (`triton.py`). On a CPU each head is computed separately, block by block
of queries. A block of queries needs three kinds of keys: the columns of the vertical lines, gathered once per head; a
range of keys, if many offsets from 0 on are chosen; and for each other offset one key per row. Columns inside the range
are computed with it and left out of the gathered ones, so no cell is counted twice; one softmax runs over all parts.

The cost of all this is known beforehand. If it exceeds `dense_above` of dense attention, the head is computed densely.
"""

from __future__ import annotations

import importlib
import math
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.lines.choice import HeadLines
from sinkscope.lines.lone import LoneLoops, lone_loops

CPU_LIMIT = 0.65
CUDA_LIMIT = 0.5
NARROW = 48
BLOCK = 256
"""Queries at a time, and half as many beside a band of more than `WIDE` offsets, which is computed in whole blocks."""
WIDE = 512
LONE_COST = 1.5
"""Number of columns of a matrix product that take as long as one lone line."""


def dense_limit(width: int, device: torch.device) -> float:
    """Share of computed cells above which plain attention is about as fast, measured on a CPU in float32.

    The limit is lower for heads narrower than 48, whose dense attention is cheaper, and for Triton, for which it was
    not measured.
    """
    if _by_kernel(device):
        return CUDA_LIMIT
    return CPU_LIMIT * min(1.0, width / NARROW)


def missing(query: Float[Tensor, "head query d_head"], value: Float[Tensor, "kv_head key d_value"]) -> str | None:
    """Why attention along lines of these inputs cannot be computed; None if it can."""
    if _by_kernel(query.device):
        module = _triton()
        if module is None:
            return "triton is not installed"
        return module.why_not(value)
    if query.device.type != "cpu":
        return "only CPUs and CUDA do that"
    if lone_loops(query.shape[-1], value.shape[-1]) is None:
        return "numba is not installed"
    return None


def _by_kernel(device: torch.device) -> bool:
    """Whether the Triton kernel computes lines there; on a CPU, its interpreter does if it was asked for."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _triton() -> Any:
    """The module with the kernel; None, with one warning, if it cannot be imported."""
    try:
        return importlib.import_module("sinkscope.lines.triton")
    except ImportError as error:
        warnings.warn(f"attention along lines is not computed: {error}; install triton", stacklevel=2)
    return None


@dataclass(frozen=True)
class Sparsity:
    """What sparse attention did in every head of a layer.

    Attributes:
        cells: Share of the causal cells that lie on the lines.
        computed: Cost as a share of the causal cells: cells that were computed, or take as long; 1.0 if dense.
        dense: Whether the head was computed by plain attention, because that is faster.
        kernel: What computed the other heads, "blocks" or "triton".
    """

    cells: tuple[float, ...]
    computed: tuple[float, ...]
    dense: tuple[bool, ...]
    kernel: str = "blocks"


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

    Returns:
        The output, in the dtype of `value`, computed in float32 (Triton computes in the inputs' dtype and accumulates
        in float32); and what was computed.

    Raises:
        SinkscopeError: Lines have the wrong shape, or a head lacks the main diagonal.
        UnsupportedError: An input requires gradients, or what computes lines is not installed.
    """
    if scaling is None:
        scaling = float(query.shape[-1] ** -0.5)
    _check(query, key, value, lines)
    inputs = _Inputs(query, key, value, scaling)
    out = torch.empty(*query.shape[:2], value.shape[-1], device=query.device, dtype=value.dtype)
    reason = missing(query, value)
    if reason is not None:
        raise UnsupportedError(
            f"attention along lines cannot be computed on {query.device.type}: {reason}; use numba, or triton on CUDA",
            page="kv-session",
        )
    limit = dense_above
    if limit is None:
        limit = dense_limit(query.shape[-1], query.device)
    compute = _in_blocks
    if _by_kernel(query.device):
        compute = _by_triton
    sparsity = compute(inputs, lines, limit, out)
    dense_heads = [head for head, dense in enumerate(sparsity.dense) if dense]
    if dense_heads:
        _dense(inputs, dense_heads, out)
    return out, sparsity


def all_dense(heads: int) -> Sparsity:
    """What is reported if plain attention computes every head."""
    return Sparsity((1.0,) * heads, (1.0,) * heads, (True,) * heads)


def _check(query: Tensor, key: Tensor, value: Tensor, lines: HeadLines) -> None:
    learned = query.requires_grad or key.requires_grad or value.requires_grad
    if learned and torch.is_grad_enabled():
        raise UnsupportedError(
            "attention along lines has no gradients: call it, or the model, under torch.no_grad()", page="kv-session"
        )
    heads, queries, width = query.shape
    keys = key.shape[1]
    fits = keys and heads % len(key) == 0 and key.shape[:2] == value.shape[:2] and key.shape[2] == width
    if not fits or lines.vertical.shape != (heads, keys) or lines.queries != queries:
        raise SinkscopeError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}, lines "
            f"{tuple(lines.vertical.shape)} of {lines.queries} queries: expected keys and values of the same heads and "
            "positions, as wide as queries, whose heads share them in equal groups and have lines of this shape"
        )
    if not bool(lines.slash[:, 0].all()):
        raise SinkscopeError("lines of a head lack the main diagonal: expected it among them")


def _by_triton(inputs: _Inputs, lines: HeadLines, limit: float, out: Tensor) -> Sparsity:
    """Write the heads that are not dense into `out`; all heads are dense if the kernel cannot be compiled."""
    module = _triton()
    index = module.index_of(lines, module.queries_at_once(inputs.value.dtype))
    costs = (index.cells() / int(lines.lengths().sum())).tolist()
    heads = torch.tensor([head for head, cost in enumerate(costs) if cost <= limit], device=out.device).long()
    if len(heads):
        compiled = module.triton_heads(inputs.query, inputs.key, inputs.value, lines, index, heads, inputs.scaling, out)
        if not compiled:
            costs = [math.inf] * len(costs)
    return _sparsity(lines, costs, limit, "triton")


def _sparsity(lines: HeadLines, costs: list[float], limit: float, kernel: str) -> Sparsity:
    """What was done if heads whose cost exceeds the limit are dense."""
    dense = [cost > limit for cost in costs]
    computed = [1.0 if cost > limit else cost for cost in costs]
    return Sparsity(tuple(lines.density().tolist()), tuple(computed), tuple(dense), kernel)


def _in_blocks(inputs: _Inputs, lines: HeadLines, limit: float, out: Tensor) -> Sparsity:
    """Write the heads that are not dense into `out`, block by block of queries."""
    loops = lone_loops(inputs.query.shape[-1], inputs.value.shape[-1])
    assert loops is not None
    cells = int(lines.lengths().sum())
    costs: list[float] = []
    heads: dict[int, _BlockedHead] = {}
    for head, density in enumerate(lines.density().tolist()):
        cost = math.inf  # lines that fill more than the limit already need no plan
        if density <= limit:
            blocked = _BlockedHead.of(inputs, lines, head, loops)
            cost = blocked.cost() / cells
            if cost <= limit:
                heads[head] = blocked
        costs.append(cost)

    def compute(head: int) -> None:
        out[head] = heads[head].attention(inputs.query[head].float() * inputs.scaling)

    _side_by_side(compute, list(heads))
    return _sparsity(lines, costs, limit, "blocks")


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


def _dense(inputs: _Inputs, heads: list[int], out: Tensor) -> None:
    """Plain causal attention of some heads, on 4-D tensors: for other shapes PyTorch builds the whole matrix."""
    index = torch.tensor(heads, device=out.device, dtype=torch.long)
    value = inputs.value[index // inputs.group][None]
    key = inputs.key[index // inputs.group][None].to(value.dtype)
    query = inputs.query[index][None].to(value.dtype)
    queries, keys = query.shape[2], key.shape[2]
    if queries == keys:
        out[index] = scaled_dot_product_attention(query, key, value, scale=inputs.scaling, is_causal=True)[0]
        return
    for start in range(0, queries, 1024):
        stop = min(queries, start + 1024)
        end = keys - queries + stop
        visible = torch.ones(stop - start, end, dtype=torch.bool, device=out.device).tril(end - (stop - start))
        parts = query[:, :, start:stop], key[:, :, :end], value[:, :, :end]
        out[index, start:stop] = scaled_dot_product_attention(*parts, visible, scale=inputs.scaling)[0]


@dataclass(frozen=True, eq=False)
class _BlockedHead:
    """One head, ready to be computed block by block.

    Attributes:
        key: Keys of all positions.
        value: Values of all positions.
        queries: Number of queries.
        columns: Vertical lines, ascending.
        columns_before: Number of vertical lines before each key.
        no_column: Whether a key lies on no vertical line.
        band: Number of offsets from 0 on that are computed as a range of keys; 0 if all are lone.
        lone: The other offsets, ascending, each of which is computed row by row.
        loops: What computes lone lines.
        size: Queries at a time.
    """

    key: Float[Tensor, "key d_head"]
    value: Float[Tensor, "key d_value"]
    queries: int
    columns: Int[Tensor, " column"]
    columns_before: Int[Tensor, " key_and_1"]
    no_column: Bool[Tensor, " key"]
    band: int
    lone: Int[Tensor, " offset"]
    loops: LoneLoops
    size: int

    @classmethod
    def of(cls, inputs: _Inputs, lines: HeadLines, head: int, loops: LoneLoops) -> _BlockedHead:
        vertical = lines.vertical[head]
        band = int(lines.slash[head].int().cumprod(0).sum())  # offsets from 0 to the first that is not chosen
        if LONE_COST * band <= band + BLOCK:
            band = 0
        return cls(
            key=inputs.key[head // inputs.group].float().contiguous(),
            value=inputs.value[head // inputs.group].float().contiguous(),
            queries=lines.queries,
            columns=vertical.nonzero().flatten(),
            columns_before=pad(vertical.cumsum(0), (1, 0)),
            no_column=~vertical,
            band=band,
            lone=lines.slash[head, band:].nonzero().flatten() + band,
            loops=loops,
            size=BLOCK if band <= WIDE else BLOCK // 2,
        )

    def cost(self) -> float:
        """Number of cells that are computed, or take as long, without the fixed cost of each block."""
        keys = len(self.key)
        start = torch.arange(keys - self.queries, keys, self.size, device=self.lone.device)
        stop = (start + self.size).clamp(max=keys)
        begin = stop
        if self.band:
            begin = (start - self.band + 1).clamp(min=0)
        width = self.columns_before[begin] + stop - begin
        lone_rows = (keys - self.lone).clamp(max=self.queries).sum()
        return float(((stop - start) * width).sum()) + LONE_COST * float(lone_rows)

    def attention(self, query: Float[Tensor, "query d_head"]) -> Float[Tensor, "query d_value"]:
        """Attention of scaled queries at the last positions."""
        query = query.contiguous()
        keys = len(self.key)
        past = keys - self.queries
        out = torch.zeros(len(query), self.value.shape[-1], device=query.device)
        column_key = self.key.index_select(0, self.columns)
        column_value = self.value.index_select(0, self.columns)
        columns_before = self.columns_before.tolist()
        lones_before = torch.searchsorted(self.lone, torch.arange(keys + 1, device=self.lone.device)).tolist()
        rows = torch.arange(self.size, device=query.device)[:, None]
        for start in range(past, keys, self.size):
            stop = min(keys, start + self.size)
            begin = stop
            if self.band:
                begin = max(0, start - self.band + 1)
            part = query[start - past : stop - past]
            at = start + rows[: len(part)]
            reaching = self.lone[: lones_before[stop]]  # lone offsets that reach a key
            count = columns_before[begin]
            first = len(reaching)
            scores = torch.empty(len(part), first + count + stop - begin, device=query.device)
            columns = scores[:, first : first + count]
            band = scores[:, first + count :]
            # In einops: "row d_head, column d_head -> row column", without a copy.
            torch.mm(part, column_key[:count].T, out=columns)
            late = columns_before[start]
            columns[:, late:].masked_fill_(self.columns[late:count] > at, -torch.inf)
            if self.band:
                torch.mm(part, self.key[begin:stop].T, out=band)
                offset = at - torch.arange(begin, stop, device=at.device)
                hidden = (offset >= self.band) & self.no_column[begin:stop] | (offset < 0)
                band.masked_fill_(hidden, -torch.inf)
            if first:  # cells on vertical lines and in the band are there already
                self.loops.scores(part, self.key, self.no_column, reaching, start, scores)
            torch.softmax(scores, -1, out=scores)
            result = out[start - past : stop - past]
            result.addmm_(columns, column_value[:count])
            result.addmm_(band, self.value[begin:stop])
            if first:
                self.loops.sums(scores, self.value, reaching, start, result)
        return out
