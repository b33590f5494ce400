"""Causal attention of some queries, and what of it lies on lines."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.lines.head_lines import HeadLines
from sinkscope.models.grouped_heads import beside_keys, by_query_head

_ROWS = 64  # queries whose attention is built at a time


def attention_of(
    query: Float[Tensor, "head row d_head"],
    key: Float[Tensor, "kv_head key d_head"],
    at: Int[Tensor, "*head row"],
    scaling: float | None = None,
) -> Float[Tensor, "head row key"]:
    """Causal attention of the queries at positions `at`, of all heads or each, in float32.

    `scaling` None means 1 / sqrt(d_head).
    """
    kv_heads, keys, width = key.shape
    if scaling is None:
        scaling = float(width**-0.5)
    # A matrix product, which is faster than einsum.
    grouped = beside_keys(query.float()[None], kv_heads) * scaling
    scores = by_query_head(grouped @ key.float().mT, 1, len(query))[0]
    future = torch.arange(keys, device=at.device) > at[..., None]
    return scores.masked_fill_(future, -torch.inf).softmax(-1)


def recovered(
    query: Float[Tensor, "head query d_head"],
    key: Float[Tensor, "kv_head key d_head"],
    lines: HeadLines,
    scaling: float | None = None,
    rows: Int[Tensor, " row"] | None = None,
) -> Float[Tensor, " head"]:
    """Share of the attention matrix's weight that lies on the lines; every cell is counted once.

    Args:
        query: As for `select_lines`.
        key: As for `select_lines`.
        lines: Lines of every head.
        scaling: Factor on the scores. None means 1 / sqrt(d_head).
        rows: Indices of the queries to use. None uses all.
    """
    if rows is None:
        rows = torch.arange(query.shape[1])
    rows = rows.to(query.device)
    total = torch.zeros(query.shape[0], dtype=torch.float64, device=query.device)
    for part in rows.split(_ROWS):
        at = lines.past + part
        on_lines = attention_of(query[:, part], key, at, scaling) * lines.rows(at)
        total += on_lines.sum((1, 2), dtype=torch.float64)
    return (total / len(rows)).float()


def slash_sums(probs: Float[Tensor, "head row key"], at: Int[Tensor, " row"]) -> Float[Tensor, "head key"]:
    """Sum of every slash line, by offset, in the rows at positions `at`."""
    falling = torch.zeros_like(probs[:, 0])  # from the largest offset to 0, so that no row has to be turned round
    for number, row in enumerate(at.tolist()):
        falling[:, probs.shape[2] - 1 - row :] += probs[:, number, : row + 1]
    return falling.flip(1)
