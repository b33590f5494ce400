"""Attention rows: the softmax of scaled scores, with everything that an architecture does to them."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from einops import repeat
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.models.grouped_heads import by_query_head, fold_groups_into_queries

Rows = Float[Tensor, "batch head query key"]


def shown(mask: Tensor) -> Bool[Tensor, "*shape"]:
    """Return where a mask of either kind, bool or additive, shows a key."""
    if mask.is_floating_point():
        return mask > torch.finfo(mask.dtype).min / 2
    return mask


def additive(mask: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Return a mask that eager attention adds to its scores."""
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return added.masked_fill_(~mask, torch.finfo(dtype).min)


def attention_probs(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    mask: Bool[Tensor, "#batch #head query key"] | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " head"] | None = None,
) -> Rows:
    """Return the softmax of scaled scores for some rows, in float32.

    Args:
        query: Queries after rotary.
        key: Keys after rotary, one per kv head; query heads share them in groups.
        mask: True where a key may be seen. None means everywhere.
        scaling: Factor on the scores.
        softcap: `cap * tanh(score / cap)` (Gemma 2).
        sinks: A learned logit per head that takes part in the softmax and is then dropped (gpt-oss).
    """
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1:3]
    grouped = fold_groups_into_queries(query, kv_heads)
    shared = key.reshape(batch * kv_heads, keys, width).mT
    is_half = query.is_cuda and query.dtype == key.dtype and query.dtype.itemsize == 2
    exact = nullcontext()
    if torch.is_autocast_enabled(query.device.type):  # it would round the scores
        exact = torch.autocast(query.device.type, enabled=False)
    with exact:
        if is_half and torch.version.hip is None and not torch.is_grad_enabled():
            scores = torch.bmm(grouped, shared, out_dtype=torch.float32)  # by tensor cores
        else:
            scores = torch.bmm(grouped.float(), shared.float())
    scores = by_query_head(scores, batch, heads).mul_(scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores.masked_fill_(~mask, torch.finfo(torch.float32).min)
    if sinks is None:
        return torch.softmax(scores, -1)
    sink_scores = repeat(sinks.float(), "head -> batch head query 1", batch=batch, query=queries)
    return torch.softmax(torch.cat([scores, sink_scores], -1), -1)[..., :-1]
