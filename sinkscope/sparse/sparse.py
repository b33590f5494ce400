"""Attention on chosen cells alone: on columns and bands in blocks, on single lines under a mask, or on everything.

On CUDA, one Triton kernel computes all heads on columns and bands (`triton.py`). On a CPU each head is computed
separately, tile by tile of queries: the keys of a tile are those of its bands and the columns outside of these, which
are gathered for one matrix product. Heads that have all bands are computed by PyTorch's own attention there.

Single slash lines are no faster than dense attention: they are computed under a mask, for comparisons.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sinkscope.errors import SinkscopeError, UnsupportedError, warn
from sinkscope.models.grouped_heads import kv_head_of
from sinkscope.sparse.attention import ROWS, Scores, attention_of
from sinkscope.sparse.bands import TILE, Lines

_ROWS = 1024  # queries at a time for which a mask is built
_TILES = 64  # tiles at a time whose keys are listed
Values = Float[Tensor, "kv_head key d_value"]
Attended = Float[Tensor, "head query d_value"]


def recovered(scores: Scores, lines: Lines, rows: Int[Tensor, " row"] | None = None) -> Float[Tensor, " head"]:
    """Measure the share of attention that lies on the lines; every cell is counted once.

    Args:
        scores: As for `select_lines`.
        lines: Lines of every head.
        rows: Indices of the queries to use. None uses all.
    """
    scores.check_plain()
    rows = torch.arange(scores.queries) if rows is None else rows
    held: list[Tensor] = []
    for part in rows.to(scores.query.device, non_blocking=True).split(ROWS):
        on_lines = attention_of(scores, part) * lines.rows(scores.past + part)
        held.append(on_lines.sum((1, 2), dtype=torch.float64))
    return (torch.stack(held).sum(0) / len(rows)).float()


def line_attention(scores: Scores, value: Values, chosen: Lines) -> Attended:
    """Compute causal attention on the lines of every head; the queries are at the last positions.

    Single lines are computed under a mask, as slowly as dense attention or slower.

    Args:
        scores: The scores of a layer without window, soft cap and learned sinks.
        value: Values of all positions.
        chosen: Lines of every query head.

    Returns:
        The output, in the dtype of `value`, computed in float32 (Triton computes in the dtype of the values and
        accumulates in float32).

    Raises:
        SinkscopeError: Shapes do not fit, or a head lacks the main diagonal or, on a CPU, the first bands.
        UnsupportedError: An input requires gradients, or triton is not installed on a GPU.
    """
    _check(scores, value, chosen)
    is_single = chosen.grid.block == 1
    module = None if is_single else triton_module(value.device, "triton")
    if module is not None:
        return module.attention_on(scores, value, chosen).transpose(0, 1)
    if not bool(chosen.offsets[:, : chosen.grid.per].all()):  # a GPU would have to wait for it
        raise SinkscopeError("lines of a head lack the main diagonal: expected all offsets of its own tile among them")
    out = torch.empty(scores.heads, scores.queries, value.shape[-1], device=value.device, dtype=value.dtype)
    is_dense = chosen.offsets.all(1).tolist()

    at = torch.arange(scores.keys, device=value.device)

    def compute(head: int) -> None:
        own = replace(chosen, columns=chosen.columns[head : head + 1], offsets=chosen.offsets[head : head + 1])
        if is_single:
            _by_torch(scores, value, head, out[head], _ROWS, lambda start, stop: own.rows(at[start:stop])[0, :, :stop])
        elif is_dense[head]:
            _dense(scores, value, head, out[head])
        else:
            _tiles(scores, value, own, head, out[head])

    _side_by_side(compute, scores.heads)
    return out


def _check(scores: Scores, value: Values, chosen: Lines) -> None:
    scores.check_plain()
    query = scores.query
    key = scores.key
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise UnsupportedError("attention on lines has no gradients: call it, or the model, under torch.no_grad()")
    kv_heads, keys = value.shape[:2]
    fits = keys and scores.heads % kv_heads == 0 and key.shape == (kv_heads, keys, query.shape[2])
    if not fits or chosen.columns.shape != (scores.heads, keys) or chosen.grid.queries != scores.queries:
        lines = tuple(chosen.columns.shape)
        raise SinkscopeError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}, lines {lines}: "
            "expected the same positions and widths, and heads in equal groups"
        )


def _tiles(scores: Scores, value: Tensor, own: Lines, head: int, out: Float[Tensor, "query d_value"]) -> None:
    """Write the attention of one head on lines of its own, tile by tile."""
    grid = own.grid
    width = scores.key.shape[2]
    kv_head = kv_head_of(head, scores.heads, len(value))
    query = scores.query[head].float() * scores.scaling
    both = torch.cat([scores.key[kv_head].float(), value[kv_head].float()], 1)  # so that they are gathered at once
    future = torch.ones(TILE, TILE, dtype=torch.bool).triu_(1)
    stops = torch.arange(TILE, grid.queries + TILE, TILE).clamp(max=grid.queries)
    start = 0
    for some in stops.split(_TILES):
        # What a tile meets before its own keys, all of its queries see: it is what its last query sees.
        for stop, seen in zip(some.tolist(), own.rows(grid.past + some - 1)[0], strict=True):
            met = both.index_select(0, seen.nonzero().flatten())
            weights = query[start:stop] @ met[:, :width].T
            weights[:, start - stop :].masked_fill_(future[: stop - start, : stop - start], -torch.inf)
            torch.softmax(weights, 1, out=weights)
            out[start:stop] = weights @ met[:, width:]
            start = stop


def _side_by_side(compute: Callable[[int], None], heads: int) -> None:
    """Compute each head in its own thread, because the matrix products of one head are too small to split."""
    threads = torch.get_num_threads()
    if min(threads, heads) < 2:
        for head in range(heads):
            compute(head)
        return
    inference = torch.is_inference_mode_enabled()

    def work(head: int) -> None:
        with torch.inference_mode(inference):
            compute(head)

    try:
        with ThreadPoolExecutor(min(threads, heads), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(work, range(heads)))
    finally:
        torch.set_num_threads(threads)  # the number that a thread sets is also what new threads start with


def _dense(scores: Scores, value: Tensor, head: int, out: Tensor) -> None:
    """Write plain causal attention of one head."""
    from torch.nn.attention.bias import causal_lower_right  # loads sympy, for which no help need wait

    rows = scores.queries
    if scores.past:
        rows = _ROWS  # at a time: on a CPU PyTorch builds their mask
    _by_torch(scores, value, head, out, rows, lambda start, stop: causal_lower_right(stop - start, stop))


def _by_torch(
    scores: Scores, value: Tensor, head: int, out: Tensor, rows: int, mask: Callable[[int, int], Any]
) -> None:
    """Write PyTorch's attention of one head.

    Args:
        scores: The scores of a layer.
        value: Values of all positions.
        head: The head.
        out: Where it is written.
        rows: Number of queries at a time.
        mask: Gives the mask of the queries at positions from the first to before the second argument.
    """
    kv_head = kv_head_of(head, scores.heads, len(value))
    for start in range(scores.past, scores.keys, rows):
        stop = min(scores.keys, start + rows)
        part = scores.part(start, stop)
        # On 4-D tensors: for other shapes PyTorch builds the whole matrix.
        query, key, values = (
            tensor.to(out.dtype)[None, None] for tensor in (part.query[head], part.key[kv_head], value[kv_head, :stop])
        )
        attended = scaled_dot_product_attention(query, key, values, mask(start, stop), scale=scores.scaling)
        out[start - scores.past : stop - scores.past] = attended[0, 0]


def lack_of_library(device: torch.device) -> str | None:
    """Say why attention on columns and bands cannot be computed on a device; None if it can."""
    if device.type not in ("cpu", "cuda"):
        return "only CPUs and CUDA do that"
    if _by_kernel(device) and _module("triton") is None:
        return "triton is not installed"
    return None


def triton_module(device: torch.device, name: str) -> ModuleType | None:
    """Find the module of kernels of this name; None where PyTorch computes.

    Raises:
        UnsupportedError: The device is neither a CPU nor CUDA, or triton is not installed.
    """
    reason = lack_of_library(device)
    if reason is not None:
        raise UnsupportedError(
            f"attention on lines cannot be computed on {device.type}: {reason}; install triton on CUDA"
        )
    return _module(name) if _by_kernel(device) else None


def _by_kernel(device: torch.device) -> bool:
    """Whether Triton computes there; on a CPU, its interpreter does if it was asked for."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _module(name: str) -> ModuleType | None:
    """A module of kernels; None, with one warning, if triton is not installed."""
    try:
        return importlib.import_module(f"sinkscope.sparse.{name}")
    except ImportError as error:
        warn(f"attention on lines is not computed: {error}; install triton")
    return None
