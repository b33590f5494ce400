"""Attention that computes chosen lines only (after MInference, Jiang et al. 2024).

Head by head in blocks of queries (`blocks.py`), or on a GPU in one call of FlexAttention (`flex.py`). What that costs
is known before, and a head for which it is more than `dense_above` of dense attention is dense.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.kv.loopserve import flex
from sinkscope.kv.loopserve.blocks import head_in_blocks, plan_of
from sinkscope.kv.loopserve.lines import HeadLines
from sinkscope.kv.loopserve.lone import lone

Kernel = Literal["auto", "blocks", "flex"]
_BLOCKS_LIMIT, _FLEX_LIMIT, _NARROW = 0.75, 0.5, 48


def dense_limit(width: int, kernel: Kernel, device: torch.device) -> float:
    """Share of computed cells above which plain attention is about as fast, measured on a CPU in float32.

    Lower for heads narrower than 48, whose dense attention is cheaper by more, and for FlexAttention, whose masks cost
    time in every block.
    """
    return _FLEX_LIMIT if _flex_wanted(kernel, device) else _BLOCKS_LIMIT * min(1.0, width / _NARROW)


def _flex_wanted(kernel: Kernel, device: torch.device) -> bool:
    return kernel == "flex" or (kernel == "auto" and device.type == "cuda")


@dataclass(frozen=True)
class Sparsity:
    """What sparse attention did in every head of a layer.

    Attributes:
        cells: share of the causal cells that lie on the lines.
        computed: share that was computed, in whole blocks, or what takes as long; 1.0 where attention was dense.
        dense: the head was computed by plain attention, because that is faster.
        kernel: what computed the others: "blocks", "blocks, lone lines not compiled" or "flex".
    """

    cells: tuple[float, ...]
    computed: tuple[float, ...]
    dense: tuple[bool, ...]
    kernel: str = "blocks"


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
    """Causal attention on the lines of every head; the queries are the last of the positions.

    Args:
        query: of the new tokens, after rotary.
        key: of all positions, after rotary; query heads share them in groups.
        value: of all positions.
        lines: for every query head. The main diagonal must be among them.
        scaling: factor on the scores; None: one over the root of `d_head`.
        dense_above: share of computed cells above which a head is computed densely, with all its cells. None:
            `dense_limit`, 0.75 in blocks, less for narrow heads, 0.5 with FlexAttention.
        kernel: "blocks": a loop over blocks of queries; "flex": FlexAttention in blocks of 128 by 128, compiled in the
            first call (10 to 20 s); "auto": "flex" on CUDA, else "blocks". Where FlexAttention cannot be had a warning
            says so, once, and it is "blocks".

    Returns:
        The output, in the type of `value`, computed in float32 (by FlexAttention: in the type of the inputs, added up
        in float32); and what was computed.

    Raises:
        SinkscopeError: lines of another shape, a head without the main diagonal, an unknown kernel.
        UnsupportedError: inputs that want gradients.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
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
    check_kernel(kernel)
    scaling = float(query.shape[-1] ** -0.5) if scaling is None else scaling
    tensors = (query, key, value)
    if _flex_wanted(kernel, query.device):
        limit = dense_limit(query.shape[-1], kernel, query.device) if dense_above is None else dense_above
        made = _by_flex(tensors, lines, scaling, limit)
        if made is not None:
            return made
    limit = dense_limit(query.shape[-1], "blocks", query.device) if dense_above is None else dense_above
    return _in_blocks(tensors, lines, scaling, limit)


def check_kernel(kernel: str) -> None:
    """Refuse an unknown kernel.

    Raises:
        SinkscopeError: it is none of `Kernel`.
    """
    if kernel not in get_args(Kernel):
        raise SinkscopeError(f'kernel={kernel!r}: expected "auto", "blocks" or "flex"')


_Three = tuple[Tensor, Tensor, Tensor]


def _in_blocks(tensors: _Three, lines: HeadLines, scaling: float, dense_above: float) -> tuple[Tensor, Sparsity]:
    query, key, value = tensors
    groups, every = len(query) // len(key), int(lines.lengths().sum())
    cells = lines.density().tolist()
    by = lone(query.shape[-1], value.shape[-1], query.device)
    # Lines that fill more than that already need no plan.
    plans = [plan_of(lines, head, by.cost) if cells[head] <= dense_above else None for head in range(len(query))]
    costs = [1.0 if plan is None else plan.cost / every for plan in plans]
    dense = tuple(plan is None or cost > dense_above for plan, cost in zip(plans, costs, strict=True))
    out = torch.empty(*query.shape[:2], value.shape[-1], device=query.device, dtype=value.dtype)

    def compute(head: int) -> None:
        q, k, v = query[head].float() * scaling, key[head // groups].float(), value[head // groups].float()
        columns, plan = lines.vertical[head].nonzero().flatten(), plans[head]
        assert plan is not None
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out[head] = head_in_blocks(q, k, v, columns, lines.slash[head], plan, by)

    _side_by_side(compute, [head for head in range(len(query)) if not dense[head]], query.device)
    _dense(tensors, dense, scaling, out)
    computed = tuple(1.0 if full else cost for full, cost in zip(dense, costs, strict=True))
    return out, Sparsity(tuple(cells), computed, dense, "blocks" if by.compiled else "blocks, lone lines not compiled")


def _by_flex(tensors: _Three, lines: HeadLines, scaling: float, dense_above: float) -> tuple[Tensor, Sparsity] | None:
    query, key, value = tensors
    if flex.why_not(query, value) is not None:
        return None
    blocks, every = flex.blocks_of(lines), int(lines.lengths().sum())
    costs = (blocks.cells() / every).tolist()
    dense = tuple(cost > dense_above for cost in costs)
    out = torch.empty(*query.shape[:2], value.shape[-1], device=query.device, dtype=value.dtype)
    sparse = torch.tensor([head for head, full in enumerate(dense) if not full], device=query.device)
    if len(sparse):
        of_head = sparse // (len(query) // len(key))
        some = HeadLines(lines.vertical[sparse], lines.slash[sparse], lines.queries)
        made = flex.flex_heads(query[sparse], key, value, some, blocks.of(sparse), of_head, scaling)
        if made is None:
            return None
        out[sparse] = made.to(out.dtype)
    _dense(tensors, dense, scaling, out)
    computed = tuple(1.0 if full else cost for full, cost in zip(dense, costs, strict=True))
    return out, Sparsity(tuple(lines.density().tolist()), computed, dense, "flex")


def _side_by_side(compute: Callable[[int], None], heads: list[int], device: torch.device) -> None:
    """Heads in threads of their own, since the products of one head are too small to be shared out."""
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
        torch.set_num_threads(threads)  # what threads set is also the start value of new ones


def _dense(tensors: _Three, dense: tuple[bool, ...], scaling: float, out: Tensor) -> None:
    """Plain causal attention of some heads; with four dimensions, for others PyTorch builds the whole matrix."""
    heads = [head for head, full in enumerate(dense) if full]
    if not heads:
        return
    query, key, value = tensors
    index: Tensor | slice = slice(None)
    if len(heads) < len(query):
        index = torch.tensor(heads, device=query.device)
        of_head = index // (len(query) // len(key))
        query, key, value = query[index], key[of_head], value[of_head]
    q, k, v = query[None].to(value.dtype), key[None].to(value.dtype), value[None]
    queries, keys, grouped = q.shape[2], k.shape[2], len(query) > len(key)
    if queries == keys:
        made = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        out[index] = made[0]
        return
    for start in range(0, queries, 1024):
        stop = min(queries, start + 1024)
        end = keys - queries + stop
        mask = torch.ones(stop - start, end, dtype=torch.bool, device=q.device).tril(end - (stop - start))
        some = (q[:, :, start:stop], k[:, :, :end], v[:, :, :end])
        made = scaled_dot_product_attention(*some, attn_mask=mask, scale=scaling, enable_gqa=grouped)
        out[index, start:stop] = made[0]
