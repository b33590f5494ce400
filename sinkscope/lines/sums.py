"""Sums of attention along vertical and slash lines, some queries at a time; no query x key matrix is ever kept.

A vertical line is a key position, a slash line an offset: query position less key position (section 3.1 of Li et al.
2025, LoopServe).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

CHUNK_BYTES = 8 << 20
"""Scores held at a time on a CPU, where what stays in the last-level cache is several times faster; 32 times as much
elsewhere, where few large steps are."""


@dataclass(frozen=True, eq=False)
class Scores:
    """What the scores of one layer and one sequence are made of.

    Attributes:
        query: after rotary; the last query sees every key.
        key: after rotary; query heads share them in groups.
        scaling: factor on the scores.
        window: keys this far back and further are not seen; None: all are.
        softcap: `cap * tanh(score / cap)` (Gemma 2).
        sinks: a learned logit per head that joins the softmax and is dropped (gpt-oss).
    """

    query: Float[Tensor, "head query d_head"]
    key: Float[Tensor, "kv_head key d_head"]
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " head"] | None = None

    def part(self, start: int, stop: int) -> Scores:
        """Those of the queries at positions `start` to `stop` and all keys that these see."""
        past = self.key.shape[1] - self.query.shape[1]
        query = self.query[:, start - past : stop - past]
        return Scores(query, self.key[:, :stop], self.scaling, self.window, self.softcap, self.sinks)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Attention of some queries. The memory is used again for the next chunk.

    Attributes:
        probs: `pad` columns of zeros, then keys `begin` to `stop`.
        begin: first key that is there.
        stop: the last of these queries sees keys below it.
    """

    probs: Float[Tensor, "head query column"]
    pad: int
    begin: int
    stop: int

    def skewed(self, like: Float[Tensor, "head query column"]) -> Float[Tensor, "head query offset"]:
        """Row r begins r columns later: equal offsets stand in one column, falling from `stop - begin - 1` to 0."""
        heads, rows, _ = like.shape
        return like.as_strided((heads, rows, self.stop - self.begin), (like.stride(0), like.stride(1) + 1, 1))


def line_sums(
    scores: Scores, *, since: int = 0, chunk: int | None = None
) -> tuple[Float[Tensor, "head key"], Float[Tensor, "head offset"]]:
    """Attention weight of every vertical and every slash line, summed over queries.

    Args:
        scores: of one layer.
        since: keys before this one are left out of the sums; they take part in the softmax.
        chunk: queries at a time; None: as many as fit `CHUNK_BYTES`.

    Returns:
        `vertical[head, key]` and `slash[head, offset]`, float32; each sums to the number of queries (less what learned
        sinks and keys before `since` take).
    """
    heads, keys = scores.query.shape[0], scores.key.shape[1]
    vertical = torch.zeros(heads, keys, device=scores.query.device)
    slash = torch.zeros(heads, keys, device=scores.query.device)  # slash[:, keys - 1 - offset] until the end
    for some in _head_groups(scores):
        for part in _chunks(scores, some, chunk):
            if since > part.begin:
                part.probs[:, :, : part.pad + since - part.begin] = 0.0
            vertical[some, part.begin : part.stop] += part.probs[:, :, part.pad :].sum(1)
            slash[some, keys - (part.stop - part.begin) :] += part.skewed(part.probs).sum(1)
    return vertical, slash.flip(1)


def crossings(
    scores: Scores,
    vertical: Bool[Tensor, "choice head key"],
    slash: Bool[Tensor, "choice head offset"],
    *,
    chunk: int | None = None,
) -> Float[Tensor, "choice head"]:
    """Attention weight of the cells where a chosen vertical and a chosen slash line cross, a number per choice.

    What the chosen lines cover is the sum of their weights less this: cells at crossings are in two of them.
    """
    choices, heads, keys = vertical.shape
    found = torch.zeros(choices, heads, device=scores.query.device)
    falling = slash.flip(2).float()
    for some in _head_groups(scores):
        both = scores.query.new_empty(0)
        for part in _chunks(scores, some, chunk):
            if both.shape != part.probs.shape:
                both = torch.zeros_like(part.probs)  # cells outside the skewed view, all in the future, stay 0
            span = part.stop - part.begin
            cells, skewed = part.skewed(part.probs), part.skewed(both)
            column = vertical.new_zeros(choices, len(both), part.pad + span, dtype=torch.float32)
            column[:, :, part.pad :] = vertical[:, some, part.begin : part.stop]
            for i in range(choices):
                torch.mul(cells, falling[i, some, None, keys - span :], out=skewed)
                found[i, some] += torch.bmm(both, column[i, :, :, None]).sum((1, 2))
    return found


def _room(device: torch.device) -> int:
    return CHUNK_BYTES * (1 if device.type == "cpu" else 32)


def _head_groups(scores: Scores) -> list[slice]:
    """Query heads to take together: those of one key/value head or more, so that 64 rows fit where they can."""
    kv_heads, keys, _ = scores.key.shape
    groups = scores.query.shape[0] // kv_heads
    size = max(1, _room(scores.query.device) // (4 * groups * 64 * max(1, keys)))
    return [slice(groups * i, groups * min(i + size, kv_heads)) for i in range(0, kv_heads, size)]


def _chunks(scores: Scores, some: slice, chunk: int | None) -> Iterator[_Chunk]:
    shared = scores.query.shape[0] // scores.key.shape[0]
    query, key = scores.query[some], scores.key[some.start // shared : some.stop // shared]
    window, sinks = scores.window, None if scores.sinks is None else scores.sinks[some]
    heads, queries, width = query.shape
    kv_heads, keys, _ = key.shape
    groups, past, device = heads // kv_heads, keys - queries, query.device
    if chunk is None:
        chunk = max(16, min(queries, _room(device) // (4 * heads * max(1, keys))))
    # Keys of zero before the first make room for the skewed view; their scores are masked.
    padded = torch.nn.functional.pad(key.float(), (0, 0, chunk - 1, 0)).transpose(1, 2)
    buffer = torch.empty(heads * chunk * (keys + chunk - 1), device=device)
    low = torch.finfo(torch.float32).min
    for start in range(0, queries, chunk):
        rows = min(chunk, queries - start)
        first, stop = past + start, past + start + rows  # positions of these queries
        begin = 0 if window is None else max(0, first - window + 1)
        span, pad = stop - begin, rows - 1
        left = chunk - 1 - pad + begin
        taken = query[:, start : start + rows].float().mul(scores.scaling)
        made = torch.bmm(
            taken.reshape(kv_heads, groups * rows, width),
            padded[:, :, left : left + pad + span],
            out=buffer[: heads * rows * (pad + span)].view(kv_heads, groups * rows, pad + span),
        ).view(heads, rows, pad + span)
        if scores.softcap is not None:
            made.div_(scores.softcap).tanh_().mul_(scores.softcap)
        # On the diagonal block the future is masked; with a window, so is what lies too far back.
        future = torch.ones(rows, rows, dtype=torch.bool, device=device).triu(1)
        made[:, :, pad + span - rows :].masked_fill_(future, low)
        if window is not None:
            index = torch.arange(begin, stop, device=device)
            where = torch.arange(first, stop, device=device)[:, None]
            made[:, :, pad:].masked_fill_(index <= where - window, low)
        made[:, :, :pad] = low
        if sinks is None:
            probs = torch.softmax(made, -1)
        else:
            extra = sinks.float()[:, None, None].expand(heads, rows, 1)
            total = torch.logaddexp(made.logsumexp(-1, keepdim=True), extra)
            probs = made.sub_(total).exp_()
        yield _Chunk(probs, pad, begin, stop)
