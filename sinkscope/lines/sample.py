"""The queries from which lines are chosen, and what the choice costs."""

from __future__ import annotations

import random

import torch
from jaxtyping import Int
from torch import Tensor

_SEARCH = 4.0  # rows of dense attention that take as long as the choice does for each sampled or checked query


def sample_queries(queries: int, sample: int, seed: int = 0) -> Int[Tensor, " row"]:
    """Indices of the sampled queries, ascending."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(queries, generator=generator)[:sample].sort().values


def choice_cost(queries: int, keys: int, sample: int, checked: int = 0) -> float:
    """Time to choose lines as a share of the time of dense attention; above 1, no choice can pay.

    On a CPU and at 2,048 to 32,768 keys, choosing takes as long as 4 rows of dense attention for every query that is
    sampled or checked if the lines of a head are hard to find, 2.4 if they are found at once, and 1.3 if a head is soon
    seen to be flat (`experiments.bench_loopserve`).
    """
    causal_cells = queries * keys - queries * (queries - 1) / 2
    read = min(sample, queries) + min(checked, queries)
    return _SEARCH * read * keys / causal_cells


def draw_of(seed: int, layer: int, queries: int, keys: int) -> int:
    """Seed of the sample of one prompt in one layer: draws differ by seed, by layer, and by turn of a conversation."""
    return random.Random(f"{seed} {layer} {queries} {keys}").getrandbits(62)


def held_out(queries: int, sample: int, seed: int = 0, count: int = 16) -> Int[Tensor, " row"]:
    """Indices of some queries outside a sample; if the sample has all queries, indices from the sample."""
    sampled = sample_queries(queries, sample, seed)
    outside = torch.ones(queries, dtype=torch.bool).index_fill_(0, sampled, False).nonzero().flatten()
    if not len(outside):
        return sampled
    return outside[sample_queries(len(outside), count, seed)]
