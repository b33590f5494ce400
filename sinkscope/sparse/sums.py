"""Sums of attention along vertical and slash lines, some queries at a time; no query x key matrix is ever kept.

A vertical line is a key position, a slash line an offset: query position less key position (section 3.1 of Li et al.
2025, LoopServe).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.models.target import Target
from sinkscope.sparse.attention import Scores, attention_of, slash_sums
from sinkscope.sparse.bands import Bands
from sinkscope.sparse.head_lines import HeadLines
from sinkscope.tap.call import Attention
from sinkscope.tap.tap import check_attention_visible, listening

ROWS = 64  # queries whose attention is computed at a time


@contextmanager
def scores_of(target: Target, observer: Callable[[int, Scores], None], layers: list[int]) -> Iterator[None]:
    """Show, as a context manager, the parts of the scores of every forward pass of one sequence to `observer`.

    Args:
        target: The model; plain or nnsight.
        observer: Called as `observer(layer, scores)`.
        layers: The layers to watch.

    Raises:
        UnsupportedError: The model is a TransformerBridge, which has its own attention, or outside transformers'
            attention interface (BLOOM, Falcon, GPT-J, MPT); attention is neither causal nor a sliding window; or tokens
            were evicted from the cache.
    """
    check_attention_visible(target)

    def see(call: Attention) -> None:
        if call.layer not in layers or call.is_repeated:
            return
        if call.mask_is_stale:
            raise UnsupportedError(
                "lines need every key at its position, and a cache policy has evicted some: measure the prompt, before "
                "anything was generated"
            )
        window = _window(call.mask, call.key.shape[2])
        with torch.no_grad():
            query = target.whole_heads(call.query[0], target.n_heads, 0)
            key = target.whole_heads(call.key[0], target.n_kv_heads, 0)
            sinks = call.sinks
            if sinks is not None:
                sinks = target.whole_heads(sinks, target.n_heads, 0)
            observer(call.layer, Scores(query, key, call.scaling, window, call.softcap, sinks))

    with listening(target, see):
        yield


def _window(mask: Tensor | None, keys: int) -> int | None:
    """The number of last keys that a mask shows to a query; None: all earlier keys."""
    if mask is None:
        return None
    seen = mask[0, 0, :, :keys]
    if seen.dtype != torch.bool:
        seen = seen == 0
    window = int(seen[-1].sum())
    past = keys - len(seen)
    if not torch.equal(seen, torch.ones_like(seen).tril(past).triu(past - window + 1)):
        raise UnsupportedError(
            "lines are of causal attention, with or without a window; this mask is neither: give texts without padding"
        )
    if window == keys:
        return None
    return window


def line_sums(scores: Scores, *, since: int = 0) -> Float[Tensor, "head kind key"]:
    """Sum the attention weight of every vertical and every slash line over the queries.

    Args:
        scores: The scores of one layer.
        since: Keys before this one, which no query stands before, take part in the softmax only; keys count from it.

    Returns:
        The sums by key, and those by offset, float32. Each kind sums to the number of queries minus the weight of
        learned sinks and of keys before `since`.
    """
    sums = torch.zeros(scores.heads, 2, scores.keys - since, device=scores.query.device)
    for at, probs in _in_blocks(scores):
        probs = probs[:, :, since:]
        seen = probs.shape[2]
        sums[:, 0, :seen] += probs.sum(1)
        sums[:, 1, :seen] += slash_sums(probs, at - since)
    return sums


def weight_on(scores: Scores, lines: HeadLines) -> Float[Tensor, "choice head"]:
    """Sum the attention of the cells on the lines, for several choices.

    Cells where lines cross count once.
    """
    weights = torch.zeros(lines.chosen.shape[:2], device=scores.query.device)
    for at, probs in _in_blocks(scores):
        for number, chosen in enumerate(lines.chosen):
            seen = HeadLines(chosen[..., : probs.shape[2]], lines.queries).rows(at)
            weights[number] += (probs * seen).sum((1, 2))
    return weights


def recovered(
    scores: Scores, lines: HeadLines | Bands, rows: Int[Tensor, " row"] | None = None
) -> Float[Tensor, " head"]:
    """Measure the share of attention that lies on the lines; every cell is counted once.

    Args:
        scores: As for `select_lines`.
        lines: Lines of every head, or columns and bands.
        rows: Indices of the queries to use. None uses all.
    """
    if rows is None:
        rows = torch.arange(scores.queries)
    scores.check_plain()
    rows = rows.to(scores.query.device, non_blocking=True)
    total = torch.zeros(scores.heads, dtype=torch.float64, device=rows.device)
    for part in rows.split(ROWS):
        on_lines = attention_of(scores, part) * lines.rows(scores.past + part)
        total += on_lines.sum((1, 2), dtype=torch.float64)
    return (total / len(rows)).float()


def _in_blocks(scores: Scores) -> Iterator[tuple[Int[Tensor, " row"], Float[Tensor, "head row key"]]]:
    """Positions of some queries, and their attention to the keys up to the last of them; then of the next ones."""
    for start in range(scores.past, scores.keys, ROWS):
        part = scores.part(start, min(start + ROWS, scores.keys))
        rows = torch.arange(part.queries, device=scores.query.device)
        yield rows + part.past, attention_of(part, rows)
