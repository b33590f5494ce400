"""Attention on chosen cells alone: on columns and bands in blocks, on single lines under a mask, or on everything.

On CUDA, one Triton kernel computes all heads on columns and bands (`triton.py`). On a CPU each head is computed
separately, tile by tile of queries: the keys of a tile are those of its bands and the columns outside of these, which
are gathered for one matrix product. Heads that have all bands are computed by PyTorch's own attention there.

Single slash lines are no faster than dense attention: they are computed under a mask, for comparisons.
"""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.arithmetic import product
from sinkscope.sparse.attention import ROWS, Scores, attention_of
from sinkscope.sparse.bands import TILE, Lines

_ROWS = 1024  # queries at a time for which PyTorch builds a mask
_TILES = 64  # tiles at a time whose keys are listed
Values = Float[Tensor, "kv_head key d_value"]


def recovered(scores: Scores, lines: Lines, rows: Int[Tensor, " row"] | None = None) -> Float[Tensor, "*choice head"]:
    """Measure the share of attention that lies on the lines; every cell is counted once.

    Args:
        scores: The scores of a layer; of learned sinks, the attention that tokens get is 1.
        lines: Lines of every head.
        rows: Indices of the queries to use. None uses all.
    """
    rows = torch.arange(scores.queries) if rows is None else rows
    held = total = torch.zeros((), dtype=torch.float64, device=scores.query.device)
    for part in rows.to(held.device, non_blocking=True).split(ROWS):
        probs = attention_of(scores, part)
        total = total + probs.sum((1, 2), dtype=torch.float64)
        held = held + (probs * lines.rows(scores.past + part)).sum((-2, -1), dtype=torch.float64)
    return (held / total).float()


def line_attention(scores: Scores, value: Values, chosen: Lines) -> Float[Tensor, "head query d_value"]:
    """Compute causal attention on the lines of every head; the queries are at the last positions.

    Single lines are computed under a mask, more slowly than dense attention.

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
    if is_single:
        _masked(scores, value, chosen, out)
    else:
        _by_head(scores, value, chosen, out)
    return out


def _masked(scores: Scores, value: Values, chosen: Lines, out: Float[Tensor, "head query d_value"]) -> None:
    """Write attention on single lines, under a mask."""
    values = value.float().repeat_interleave(scores.heads // len(value), 0)
    for rows in torch.arange(scores.queries, device=value.device).split(ROWS):
        weights = attention_of(scores, rows, chosen.rows(scores.past + rows))
        out[:, rows] = product(weights, values).to(out.dtype)


def _by_head(scores: Scores, value: Values, chosen: Lines, out: Float[Tensor, "head query d_value"]) -> None:
    """Write attention on bands and columns, each head in a thread: its matrix products are too small to split."""
    is_dense = chosen.dense.tolist()
    is_inference = torch.is_inference_mode_enabled()

    def compute(head: int) -> None:
        with torch.inference_mode(is_inference):
            if is_dense[head]:
                _dense(scores, value, head, out[head])
            else:
                part = slice(head, head + 1)
                of_head = replace(chosen, columns=chosen.columns[part], offsets=chosen.offsets[part])
                _tiles(scores, value, of_head, head, out[head])

    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(min(threads, scores.heads), initializer=partial(torch.set_num_threads, 1)) as pool:
            run = map if threads == 1 else pool.map
            list(run(compute, range(scores.heads)))
    finally:
        torch.set_num_threads(threads)  # the number that a thread sets is also what new threads start with


def _check(scores: Scores, value: Values, chosen: Lines) -> None:
    """Refuse what attention along lines cannot be computed of."""
    scores.check_plain()
    if torch.is_grad_enabled() and any(part.requires_grad for part in (scores.query, scores.key, value)):
        raise UnsupportedError("attention on lines has no gradients: call it, or the model, under torch.no_grad()")
    found = (*value.shape[:2], *chosen.columns.shape, chosen.grid.queries)
    wanted = (*scores.key.shape[:2], scores.heads, scores.keys, scores.queries)
    if found != wanted or scores.heads % len(value):
        raise SinkscopeError(
            f"kv heads, keys, heads of lines, their keys and queries are {found}: expected the same positions, "
            f"{wanted}, and heads in equal groups"
        )


def _tiles(scores: Scores, value: Tensor, lines: Lines, head: int, out: Float[Tensor, "query d_value"]) -> None:
    """Write the attention of one head on lines of its own, tile by tile."""
    grid = lines.grid
    width = scores.key.shape[2]
    kv_head = head * len(value) // scores.heads
    query = scores.query[head].float() * scores.scaling
    both = torch.cat([scores.key[kv_head].float(), value[kv_head].float()], 1)  # so that they are gathered at once
    future = torch.ones(TILE, TILE, dtype=torch.bool).triu_(1)
    stops = torch.arange(TILE, grid.queries + TILE, TILE).clamp(max=grid.queries)
    start = 0
    for part in stops.split(_TILES):
        # What a tile meets before its own keys, all of its queries see: it is what its last query sees.
        for stop, visible in zip(part.tolist(), lines.rows(grid.past + part - 1)[0], strict=True):
            met = both.index_select(0, visible.nonzero().flatten())
            weights = product(query[start:stop], met[:, :width].T)
            weights[:, start - stop :].masked_fill_(future[: stop - start, : stop - start], -torch.inf)
            torch.softmax(weights, 1, out=weights)
            out[start:stop] = product(weights, met[:, width:])
            start = stop


def _dense(scores: Scores, value: Tensor, head: int, out: Float[Tensor, "query d_value"]) -> None:
    """Write PyTorch's causal attention of one head."""
    from torch.nn.attention.bias import causal_lower_right  # loads sympy, for which no help need wait

    kv_head = head * len(value) // scores.heads
    rows = scores.queries
    if scores.past:
        rows = _ROWS  # at a time: on a CPU PyTorch builds their mask
    for start in range(scores.past, scores.keys, rows):
        stop = min(scores.keys, start + rows)
        part = scores.part(start, stop)
        # On 4-D tensors: for other shapes PyTorch builds the whole matrix.
        query, key, values = (
            tensor.to(out.dtype)[None, None] for tensor in (part.query[head], part.key[kv_head], value[kv_head, :stop])
        )
        mask: Any = causal_lower_right(stop - start, stop)
        attended = scaled_dot_product_attention(query, key, values, mask, scale=scores.scaling)
        out[start - scores.past : stop - scores.past] = attended[0, 0]


@cache
def lack_of_library(device: torch.device) -> str | None:
    """Say why attention on columns and bands cannot be computed on a device; None if it can."""
    try:
        triton_module(device, "triton")
    except UnsupportedError as error:
        return str(error).rpartition(": ")[2]
    return None


def triton_module(device: torch.device, name: str) -> ModuleType | None:
    """Find the module of kernels of this name; None where PyTorch computes: on a CPU, unless Triton interprets there.

    Raises:
        UnsupportedError: The device is neither a CPU nor CUDA, or triton is not installed.
    """
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"attention on lines cannot be computed on {device.type}: only CPUs and CUDA do that")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    try:
        return importlib.import_module(f"sinkscope.sparse.{name}")
    except ImportError as error:
        raise UnsupportedError("attention on lines cannot be computed on CUDA: install triton") from error
