"""Sums of attention along vertical and slash lines, some queries at a time; no query x key matrix is ever kept.

A vertical line is a key position, a slash line an offset: query position less key position (section 3.1 of Li et al.
2025, LoopServe).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.errors import UnsupportedError
from sinkscope.lines.attention import Scores
from sinkscope.lines.head_lines import HeadLines
from sinkscope.models.grouped_heads import heads_of
from sinkscope.models.target import Target
from sinkscope.tap.call import Attention
from sinkscope.tap.observers import refuse_opaque
from sinkscope.tap.tap import listening

CHUNK_BYTES = 4 << 20
"""Scores held at a time on a CPU, where work that stays in the cache is several times faster; other devices, on which
few large steps are faster, hold 64 times as much."""


@contextmanager
def scores_of(target: Target, observer: Callable[[int, Scores], None], layers: list[int]) -> Iterator[None]:
    """Context manager: every forward pass of one sequence shows the parts of its scores to `observer`.

    Args:
        target: The model; plain or nnsight.
        observer: Called as `observer(layer, scores)`.
        layers: The layers to watch.

    Raises:
        UnsupportedError: The model is a TransformerBridge, which has its own attention, or outside transformers'
            attention interface (Falcon); attention is neither causal nor a sliding window; or tokens were evicted from
            the cache.
    """
    refuse_opaque(target)

    def see(call: Attention) -> None:
        if call.layer not in layers or call.is_repeated:
            return
        if call.evicted:
            raise UnsupportedError(
                "lines need every key at its position, and a cache policy has evicted some: measure the prompt, before "
                "anything was generated"
            )
        window = _window(call.mask, call.key.shape[2])
        with torch.no_grad():
            query = target.shards.gather(call.query[0], target.n_heads, 0)
            key = target.shards.gather(call.key[0], target.n_kv_heads, 0)
            sinks = call.sinks
            if sinks is not None:
                sinks = target.shards.gather(sinks, target.n_heads, 0)
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


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Attention of some queries of the query heads that share a kv head.

    Attributes:
        heads: These query heads.
        probs: One column of zeros less than there are queries, then keys `begin` to `stop`.
        begin: First key in `probs`.
        stop: One past the last key that the last of these queries sees.
    """

    heads: slice
    probs: Float[Tensor, "head query column"]
    begin: int
    stop: int

    @property
    def zeros(self) -> int:
        """Number of columns before the keys."""
        return self.probs.shape[1] - 1

    def skewed(self, like: Float[Tensor, "head query column"]) -> Float[Tensor, "head query offset"]:
        """A view whose row r begins r columns later: a column holds one offset, from `stop - begin - 1` down to 0."""
        heads, rows, _ = like.shape
        return like.as_strided((heads, rows, self.stop - self.begin), (like.stride(0), like.stride(1) + 1, 1))


def line_sums(scores: Scores, *, since: int = 0) -> Float[Tensor, "head kind key"]:
    """Sum the attention weight of every vertical and every slash line over the queries.

    Args:
        scores: The scores of one layer.
        since: Keys before this one are left out of the sums but take part in the softmax.

    Returns:
        The sums by key, and those by offset, float32. Each kind sums to the number of queries minus the weight of
        learned sinks and of keys before `since`.
    """
    keys = scores.keys
    vertical = torch.zeros(scores.heads, keys, device=scores.query.device)
    slash = torch.zeros_like(vertical)  # slash[:, keys - 1 - offset] until the end
    for part in _chunks(scores):
        if since > part.begin:
            part.probs[:, :, : part.zeros + since - part.begin] = 0.0
        vertical[part.heads, part.begin : part.stop] += part.probs[:, :, part.zeros :].sum(1)
        slash[part.heads, keys - (part.stop - part.begin) :] += part.skewed(part.probs).sum(1)
    return torch.stack([vertical, slash.flip(1)], 1)


def crossings(scores: Scores, lines: HeadLines) -> Float[Tensor, "choice head"]:
    """Attention weight of the cells where a chosen vertical and a chosen slash line cross, for several choices.

    The chosen lines together carry the sum of their weights minus this weight, because crossings count twice.
    """
    choices, heads, keys = lines.vertical.shape
    weights = torch.zeros(choices, heads, device=scores.query.device)
    falling = lines.slash.flip(2).float()
    both = scores.query.new_empty(0)
    for part in _chunks(scores):
        if both.shape != part.probs.shape:
            both = torch.zeros_like(part.probs)  # cells outside the skewed view, all in the future, stay 0
        cells = part.skewed(part.probs)
        skewed = part.skewed(both)
        column = pad(lines.vertical[:, part.heads, part.begin : part.stop].float(), (part.zeros, 0))
        for i in range(choices):
            torch.mul(cells, falling[i, part.heads, None, keys - cells.shape[2] :], out=skewed)
            weights[i, part.heads] += torch.bmm(both, column[i, :, :, None]).sum((1, 2))
    return weights


def _chunks(scores: Scores) -> Iterator[_Chunk]:
    kv_heads = len(scores.key)
    row_bytes = 4 * (scores.heads // kv_heads) * max(1, scores.keys)
    rows_at_once = min(64, CHUNK_BYTES // row_bytes)
    if scores.query.device.type != "cpu":
        rows_at_once = 64 * CHUNK_BYTES // row_bytes
    low = torch.finfo(torch.float32).min
    for kv_head, key in enumerate(scores.key.float()):
        heads = heads_of(kv_head, scores.heads, kv_heads)
        stop = scores.past
        for query in scores.query[heads].split(max(16, rows_at_once), 1):
            rows = query.shape[1]
            first, stop = stop, stop + rows  # positions of these queries
            begin = 0
            if scores.window is not None:
                begin = max(0, first - scores.window + 1)
            scaled = rearrange(query.float() * scores.scaling, "head row d_head -> (head row) d_head")
            products = scaled @ rearrange(key[begin:stop], "key d_head -> d_head key")
            values = rearrange(products, "(head row) key -> head row key", row=rows)
            if scores.softcap is not None:
                values.div_(scores.softcap).tanh_().mul_(scores.softcap)
            # On the diagonal block the future is masked; with a window, so is what lies too far back.
            future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
            values[:, :, first - begin :].masked_fill_(future, low)
            if scores.window is not None:
                back = torch.ones(rows, stop - begin, dtype=torch.bool, device=query.device)
                values.masked_fill_(back.tril(first - begin - scores.window), low)
            if scores.sinks is not None:  # a key that takes part in the softmax only
                sinks = repeat(scores.sinks[heads].float(), "head -> head row 1", row=rows)
                values = torch.cat([values, sinks], 2)
            probs = torch.softmax(values, -1)[:, :, : stop - begin]
            yield _Chunk(heads, pad(probs, (rows - 1, 0)), begin, stop)  # room for the skewed view
