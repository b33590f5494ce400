"""Sequences without a repeated token, from the tokens of one cluster or of all: drawn, or searched for."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError

Pools = Mapping[int, Int[Tensor, " token"]]  # head -> the tokens of its cluster
Score = Callable[[Tensor], Tensor]  # sequences [row pos] -> how sink-like each position is [row pos]
_BLOCKS = 8  # a search decides over an eighth of a sequence at a time


def make_pools(clusters: Mapping[int, Sequence[int]], vocabulary: int, left_out: set[int]) -> dict[int, Tensor]:
    """The clusters as tensors, without the tokens of `left_out`; clusters of less than two tokens make no attack.

    Raises:
        SinkscopeError: a token that the model does not have.
    """
    pools: dict[int, Tensor] = {}
    for head, tokens in clusters.items():
        ids = sorted({int(t) for t in tokens} - left_out)
        if ids and not (ids[0] >= 0 and ids[-1] < vocabulary):
            wrong = ids[0] if ids[0] < 0 else ids[-1]
            raise SinkscopeError(
                f"clusters: token {wrong} of head {head} is not in the vocabulary of {vocabulary} tokens; give ids "
                f"from 0 to {vocabulary - 1}"
            )
        if len(ids) > 1:
            pools[int(head)] = torch.tensor(ids)
    return pools


def draw(pools: Pools, length: int, count: int, seed: int) -> tuple[Int[Tensor, "row pos"], Int[Tensor, " row"]]:
    """`count` sequences of different tokens of one cluster each, the clusters in turn, and the head of each.

    No rows if no cluster has `length` tokens.
    """
    generator = _generator("draw", seed, length)
    heads = [head for head, tokens in pools.items() if len(tokens) >= length]
    of = [heads[i % len(heads)] for i in range(count if heads else 0)]
    rows = [pools[h][torch.randperm(len(pools[h]), generator=generator)[:length]] for h in of]
    empty = torch.zeros(0, length, dtype=torch.long)
    return torch.stack(rows) if rows else empty, torch.tensor(of, dtype=torch.long)


def repeat(rows: Int[Tensor, "row pos"]) -> Int[Tensor, "row pos"]:
    """The first token of each sequence over and over: what the attack does without."""
    return rows[:, :1].expand_as(rows).contiguous()


def greedy(
    score: Score, pools: Pools, length: int, count: int, candidates: int, seed: int
) -> tuple[Int[Tensor, "row pos"], Int[Tensor, " row"]]:
    """Sequences grown block by block; of some random blocks the one is taken whose own positions score highest.

    Later tokens cannot change earlier positions, so nothing is computed twice but the prefix.

    Args:
        score: see `Score`; given sequences of any length.
        pools: the clusters.
        length: tokens of a sequence.
        count: sequences.
        candidates: blocks tried at each step.
        seed: of the draws.
    """
    generator = _generator("greedy", seed, length)
    orders, heads = draw(pools, length, count, seed)  # only which clusters are large enough
    ids = orders[:, :0]
    for size in _block_sizes(length) if len(orders) else []:
        tried = torch.stack(
            [_spare(pools[int(h)], row, size, candidates, generator) for h, row in zip(heads, ids, strict=True)]
        )
        grown = torch.cat([ids[:, None].expand(-1, candidates, -1), tried], -1)
        scores = score(grown.flatten(0, 1))[:, -size:].mean(-1).view(len(ids), candidates)
        ids = grown[torch.arange(len(ids)), scores.argmax(-1)]
    return ids, heads


def coordinate(
    score: Score, rows: Int[Tensor, "row pos"], heads: Int[Tensor, " row"], pools: Pools, candidates: int, seed: int
) -> Int[Tensor, "row pos"]:
    """Sequences improved block by block: each block is replaced by the best of some random ones, or stays.

    The mean score never falls. Tokens come from the same cluster and are not in the sequence yet; where the cluster
    has not enough of them, the block stays as it is.
    """
    generator = _generator("coordinate", seed, rows.shape[1])
    ids, start = rows.clone(), 0
    for size in _block_sizes(rows.shape[1]):
        block = slice(start, start + size)
        start += size
        able = [i for i, h in enumerate(heads.tolist()) if len(pools[h]) >= rows.shape[1] + size]
        if not able:
            continue
        tried = ids[able][:, None].repeat(1, candidates, 1)
        for i, row in enumerate(able):  # candidate 0 is the sequence as it is
            tried[i, 1:, block] = _spare(pools[int(heads[row])], ids[row], size, candidates - 1, generator)
        scores = score(tried.flatten(0, 1)).mean(-1).view(len(able), candidates)
        ids[able] = tried[torch.arange(len(able)), scores.argmax(-1)]
    return ids


def _generator(what: str, seed: int, length: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{what} {seed} {length}".encode()))


def _block_sizes(length: int) -> list[int]:
    edges = torch.linspace(0, length, min(_BLOCKS, length) + 1).round().int().tolist()
    return [b - a for a, b in pairwise(edges)]


def _spare(
    pool: Tensor, used: Tensor, size: int, count: int, generator: torch.Generator
) -> Int[Tensor, "candidate pos"]:
    spare = pool[~torch.isin(pool, used)]
    return torch.stack([spare[torch.randperm(len(spare), generator=generator)[:size]] for _ in range(count)])


def round_trip(tokenizer: Any, rows: Int[Tensor, "row pos"]) -> float:
    """Share of sequences that come back as the same ids when they are written as text and read again."""
    texts = tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)
    again = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return sum(a == b for a, b in zip(again, rows.tolist(), strict=True)) / max(len(rows), 1)
