"""The queries from which lines are chosen, and those that were left out."""

from __future__ import annotations

import random

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.models.draws import draws

HELD_OUT = 16
"""Queries outside the sample on which it is measured what lines hold."""


def sample_queries(
    queries: int, sample: int, seed: int, copies: Int[Tensor, " copy"] | None = None
) -> Int[Tensor, " row"]:
    """Draw indices of the sampled queries, ascending.

    Args:
        queries: Number of queries.
        sample: Number of sampled queries; all are taken if there are fewer.
        seed: Seed of the draws.
        copies: Indices of queries at which the text copies itself. Half of the sample are drawn among these, because a
            random sample seldom has one.
    """
    generator = torch.Generator().manual_seed(seed)
    if copies is None:
        return torch.randperm(queries, generator=generator)[:sample].sort().values
    copies = copies[copies < queries]
    order = torch.randperm(len(copies), generator=draws(seed, "queries at copies"))
    copied = copies[order[: sample // 2]]
    others = torch.ones(queries, dtype=torch.bool).index_fill_(0, copied, False).nonzero().flatten()
    order = torch.randperm(len(others), generator=generator)
    return torch.cat([copied, others[order[: sample - len(copied)]]]).sort().values


def draw_of(seed: int, layer: int, queries: int, keys: int) -> int:
    """Make the seed of one prompt in one layer: draws differ by seed, by layer, and by turn of a conversation."""
    return random.Random(f"{seed} {layer} {queries} {keys}").getrandbits(62)


def held_out(queries: int, sampled: Int[Tensor, " sampled"], seed: int) -> Int[Tensor, " row"]:
    """Draw indices of some queries outside a sample; if the sample has all queries, indices from the sample."""
    outside = torch.ones(queries, dtype=torch.bool).index_fill_(0, sampled, False).nonzero().flatten()
    if not len(outside):
        return sampled
    return outside[sample_queries(len(outside), HELD_OUT, seed)]
