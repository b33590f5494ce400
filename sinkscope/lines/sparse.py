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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from sinkscope.errors import SinkscopeError, UnsupportedError, warn
from sinkscope.lines.attention import Scores, causal_cells
from sinkscope.lines.head_lines import HeadLines
from sinkscope.models.grouped_heads import kv_head_of

CPU_LIMIT = 0.65
CUDA_LIMIT = 0.6
CUDA_START = 11_600**2 / 2
"""Cells of dense attention that take as long as what depends on the length alone."""
NARROW = 48
BLOCK = 256
"""Queries at a time, and half as many beside a band of more than `WIDE` offsets, which is computed in whole blocks."""
WIDE = 512
LONE_COST = 1.5
"""Number of columns of a matrix product that take as long as one lone line."""


def dense_limit(query: Float[Tensor, "head query d_head"], keys: int, dense_above: float | None = None) -> float:
    """Share of computed cells above which heads are dense: as given, or where plain attention is about as fast.

    It was measured on a CPU in float32 and on GPUs.

    On a CPU the limit is lower for heads narrower than 48, whose dense attention is cheaper. On an H200 and an H100 a
    cell takes 1.6 times as long with Triton as with flash attention, and what depends on the length alone takes as long
    as a dense prompt of 11,600 tokens (`experiments.gpu.loopserve`); shorter prompts are therefore dense.
    """
    if dense_above is not None:
        return dense_above
    _, queries, width = query.shape
    if query.is_cuda:
        return max(0.0, CUDA_LIMIT * (1 - CUDA_START / causal_cells(queries, keys)))
    return CPU_LIMIT * min(1.0, width / NARROW)


def lack_of_library(device: torch.device) -> str | None:
    """Why attention along lines cannot be computed on a device; None if it can."""
    if device.type not in ("cpu", "cuda"):
        return "only CPUs and CUDA do that"
    library = "numba"
    if _by_kernel(device):
        library = "triton"
    if _module(library) is None:
        return f"{library} is not installed"
    return None


def _by_kernel(device: torch.device) -> bool:
    """Whether the Triton kernel computes lines there; on a CPU, its interpreter does if it was asked for."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _module(library: str) -> Any:
    """The module that computes lines with a library; None, with one warning, if that is not installed."""
    try:
        return importlib.import_module({"numba": "sinkscope.lines.lone", "triton": "sinkscope.lines.triton"}[library])
    except ImportError as error:
        warn(f"attention along lines is not computed: {error}; install {library}")
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


def sparse_attention(
    scores: Scores, value: Float[Tensor, "kv_head key d_value"], lines: HeadLines, *, dense_above: float | None = None
) -> tuple[Float[Tensor, "head query d_value"], Sparsity]:
    """Causal attention on the lines of every head; the queries are at the last positions.

    Args:
        scores: The scores of a layer without window, soft cap and learned sinks.
        value: Values of all positions.
        lines: Chosen lines of every query head. The main diagonal must be among them.
        dense_above: Share of computed cells above which a head is computed densely, with all its cells. None:
            `dense_limit`, which is 0.65 in blocks, less for narrow heads, and up to 0.6 on a GPU.

    Returns:
        The output, in the dtype of `value`, computed in float32 (Triton computes in the inputs' dtype and accumulates
        in float32); and what was computed.

    Raises:
        SinkscopeError: Lines have the wrong shape, or a head lacks the main diagonal.
        UnsupportedError: An input requires gradients, or what computes lines is not installed.
    """
    query = scores.query
    _check(scores, value, lines)
    out = torch.empty(*query.shape[:2], value.shape[-1], device=query.device, dtype=value.dtype)
    reason = lack_of_library(query.device)
    if reason is not None:
        raise UnsupportedError(
            f"attention along lines cannot be computed on {query.device.type}: {reason}; use numba, or triton on CUDA"
        )
    limit = dense_limit(query, scores.keys, dense_above)
    density: list[float] = lines.density().tolist()
    if _by_kernel(query.device):
        kernel, costs = "triton", _by_triton(scores, value, lines, limit, out)
    else:
        kernel, costs = "blocks", _in_blocks(scores, value, lines, density, limit, out)
    dense_heads = [head for head, cost in enumerate(costs) if cost > limit]
    if dense_heads:
        _dense(scores, value, dense_heads, out)
    for head in dense_heads:
        costs[head] = 1.0
    dense = tuple(head in dense_heads for head in range(len(costs)))
    return out, Sparsity(tuple(density), tuple(costs), dense, kernel)


def dense_attention(scores: Scores, value: Float[Tensor, "kv_head key d_value"]) -> Float[Tensor, "head query d_value"]:
    """Plain causal attention of all heads, in the dtype of the values."""
    out = value.new_empty(scores.heads, scores.queries, value.shape[-1])
    _dense(scores, value, list(range(scores.heads)), out)
    return out


def all_dense(heads: int) -> Sparsity:
    """What is reported if plain attention computes every head."""
    return Sparsity((1.0,) * heads, (1.0,) * heads, (True,) * heads)


def _check(scores: Scores, value: Tensor, lines: HeadLines) -> None:
    scores.check_plain()
    query, key = scores.query, scores.key
    learned = query.requires_grad or key.requires_grad or value.requires_grad
    if learned and torch.is_grad_enabled():
        raise UnsupportedError("attention along lines has no gradients: call it, or the model, under torch.no_grad()")
    heads, queries, width = query.shape
    kv_heads, keys = value.shape[:2]
    fits = keys and heads % kv_heads == 0 and key.shape == (kv_heads, keys, width)
    if not fits or lines.vertical.shape != (heads, keys) or lines.queries != queries:
        raise SinkscopeError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}, lines "
            f"{tuple(lines.vertical.shape)}: expected the same positions and widths, and heads in equal groups"
        )
    if not bool(lines.slash[:, 0].all()):
        raise SinkscopeError("lines of a head lack the main diagonal: expected it among them")


def _by_triton(scores: Scores, value: Tensor, lines: HeadLines, limit: float, out: Tensor) -> list[float]:
    """Write the heads that cost at most the limit into `out`; infinite costs if the kernel cannot be compiled."""
    module = _module("triton")
    index = module.index_of(lines, module.queries_at_once(value.dtype))
    costs = (index.cells() / int(lines.lengths().sum())).tolist()
    heads = torch.tensor([head for head, cost in enumerate(costs) if cost <= limit], device=out.device).long()
    if len(heads):
        if not module.triton_heads(scores, value, lines, index, heads, out):
            return [math.inf] * len(costs)
    return costs


def _in_blocks(
    scores: Scores, value: Tensor, lines: HeadLines, densities: list[float], limit: float, out: Tensor
) -> list[float]:
    """Write the heads that cost at most the limit into `out`, block by block of queries; the costs of all heads."""
    loops = _module("numba").lone_loops(scores.query.shape[-1], value.shape[-1])
    cells = int(lines.lengths().sum())
    costs: list[float] = []
    heads: dict[int, _BlockedHead] = {}
    for head, density in enumerate(densities):
        costs.append(math.inf)  # lines that fill more than the limit already need no plan
        if density <= limit:
            blocked = _BlockedHead(scores, value, lines, head, loops)
            costs[head] = blocked.cost() / cells
            if costs[head] <= limit:
                heads[head] = blocked

    def compute(head: int) -> None:
        out[head] = heads[head].attention(scores.query[head].float() * scores.scaling)

    _side_by_side(compute, list(heads))
    return costs


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
        rows = 1024  # at a time: on a CPU PyTorch builds their mask
    kv_head = partial(kv_head_of, heads=scores.heads, kv_heads=len(value))
    groups: list[tuple[slice | list[int], slice | list[int]]] = []  # kv heads, and the query heads that read them
    by_flash = out.is_cuda and out.dtype.itemsize == 2 and scores.query.shape[-1] <= 256
    if by_flash and len(heads) == scores.heads:  # other kernels do not share keys: PyTorch would build the whole matrix
        groups.append((slice(None), slice(None)))
    elif out.is_cuda:  # one kv head after another takes five times as long
        groups.append((list(map(kv_head, heads)), heads))
    else:
        for own_head, some in groupby(heads, key=kv_head):  # so that no keys are copied
            groups.append((slice(own_head, own_head + 1), list(some)))
    for kv_heads, own in groups:
        for start in range(0, scores.queries, rows):
            stop = min(scores.queries, start + rows)
            end = scores.past + stop
            parts = scores.query[own, start:stop], scores.key[kv_heads, :end], value[kv_heads, :end]
            query, key, values = (part.to(out.dtype)[None] for part in parts)
            visible, grouped = causal_lower_right(stop - start, end), query.shape[1] != key.shape[1]
            out[own, start:stop] = scaled_dot_product_attention(
                query, key, values, visible, scale=scores.scaling, enable_gqa=grouped
            )[0]


class _BlockedHead:
    """One head, ready to be computed block by block: the blocks, and which keys each of them meets."""

    def __init__(self, scores: Scores, value: Tensor, lines: HeadLines, head: int, loops: Any) -> None:
        kv_head = kv_head_of(head, scores.heads, len(value))
        self.key: Float[Tensor, "key d_head"] = scores.key[kv_head].float().contiguous()
        self.value: Float[Tensor, "key d_value"] = value[kv_head].float().contiguous()
        self.lone_scores, self.lone_sums = loops
        vertical, slash = lines.vertical[head], lines.slash[head]
        self.columns: Int[Tensor, " column"] = vertical.nonzero().flatten()
        self.columns_before: list[int] = pad(vertical.cumsum(0), (1, 0)).tolist()  # each key, and in all
        self.no_column = ~vertical
        band = int(slash.int().cumprod(0).sum())  # offsets from 0 to the first that is not chosen
        if LONE_COST * band <= band + BLOCK:
            band = 0
        self.band = band  # offsets from 0 on that are computed as a range of keys
        self.lone: Int[Tensor, " offset"] = slash[band:].nonzero().flatten() + band
        self.size = BLOCK if band <= WIDE else BLOCK // 2
        self.blocks: list[tuple[int, int, int]] = []  # the first position, one past the last, the first key of the band
        keys = len(vertical)
        for start in range(lines.past, keys, self.size):
            stop = min(keys, start + self.size)
            self.blocks.append((start, stop, max(0, start - band + 1) if band else stop))

    def cost(self) -> float:
        """Number of cells that are computed, or take as long, without the fixed cost of each block."""
        cells = 0
        for start, stop, begin in self.blocks:
            cells += (stop - start) * (self.columns_before[begin] + stop - begin)
        queries = len(self.key) - self.blocks[0][0]
        return cells + LONE_COST * float((len(self.key) - self.lone).clamp(max=queries).sum())

    def attention(self, query: Float[Tensor, "query d_head"]) -> Float[Tensor, "query d_value"]:
        """Attention of scaled queries at the last positions."""
        out = torch.zeros(len(query), self.value.shape[-1], device=query.device)
        column_key = self.key.index_select(0, self.columns)
        column_value = self.value.index_select(0, self.columns)
        parts = zip(self.blocks, query.contiguous().split(self.size), out.split(self.size), strict=True)
        for (start, stop, begin), part, result in parts:
            at = torch.arange(start, stop, device=query.device)[:, None]
            reaching = self.lone[self.lone < stop]  # lone offsets that reach a key
            first = len(reaching)
            count = self.columns_before[begin]
            scores = torch.empty(len(part), first + count + stop - begin, device=query.device)
            columns = scores[:, first : first + count]
            band = scores[:, first + count :]
            # In einops: "row d_head, column d_head -> row column", without a copy.
            torch.mm(part, column_key[:count].T, out=columns)
            late = self.columns_before[start]
            columns[:, late:].masked_fill_(self.columns[late:count] > at, -torch.inf)
            if self.band:
                torch.mm(part, self.key[begin:stop].T, out=band)
                offset = at - torch.arange(begin, stop, device=at.device)
                hidden = (offset >= self.band) & self.no_column[begin:stop] | (offset < 0)
                band.masked_fill_(hidden, -torch.inf)
            if first:  # cells on vertical lines and in the band are there already
                self.lone_scores(part, self.key, self.no_column, reaching, start, scores)
            torch.softmax(scores, -1, out=scores)
            result.addmm_(columns, column_value[:count])
            result.addmm_(band, self.value[begin:stop])
            if first:
                self.lone_sums(scores, self.value, reaching, start, result)
        return out
