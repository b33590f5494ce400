"""The queries from which lines are chosen, and those that were left out."""

from __future__ import annotations

import random

import torch
from jaxtyping import Int
from torch import Tensor

HELD_OUT = 16
"""Queries outside the sample on which it is measured what lines hold."""


def sample_queries(queries: int, sample: int, seed: int) -> Int[Tensor, " row"]:
    """Draw indices of the sampled queries, ascending."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(queries, generator=generator)[:sample].sort().values


def draw_of(seed: int, layer: int, queries: int, keys: int) -> int:
    """Make the seed of one prompt in one layer: draws differ by seed, by layer, and by turn of a conversation."""
    return random.Random(f"{seed} {layer} {queries} {keys}").getrandbits(62)


def held_out(queries: int, sample: int, seed: int) -> Int[Tensor, " row"]:
    """Draw indices of some queries outside a sample; if the sample has all queries, indices from the sample."""
    sampled = sample_queries(queries, sample, seed)
    outside = torch.ones(queries, dtype=torch.bool).index_fill_(0, sampled, False).nonzero().flatten()
    if not len(outside):
        return sampled
    return outside[sample_queries(len(outside), HELD_OUT, seed)]
