"""The queries from which lines are chosen, and those that were left out."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.models.draws import draws
from sinkscope.sparse.bands import BAND, TILE, BlockGrid, CopiedBlocks

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


FAR = 256
"""Tokens between the end of a phrase and the end of its copy, at least."""
AROUND = (-1, 2)
"""First and last key that a copy needs, counted from the last token of the original."""
_ID_BITS = 21  # of an id: three fit into 63


@dataclass(frozen=True, eq=False)
class Copies:
    """The queries of a prompt that are copies.

    Attributes:
        at: Their indices, on the CPU.
        blocks: The blocks of keys that they need, on the device of the prompt.
    """

    at: Int[Tensor, " copy"]
    blocks: CopiedBlocks

    @classmethod
    def of(cls, ids: Int[Tensor, " pos"], queries: int, device: torch.device) -> Copies:
        """Find the copies among the last `queries` tokens of a text.

        Args:
            ids: Ids of the whole text, on the CPU; those below 0 are unknown, and no copies.
            queries: Number of queries.
            device: Device of the prompt.
        """
        grid = BlockGrid(queries, len(ids))
        at, original = copies_in(ids)
        at, original = at[at >= grid.past] - grid.past, original[at >= grid.past]
        keys = (original[:, None] + torch.tensor(AROUND)).clamp(min=0) + grid.lead
        tile = (at // TILE)[:, None].expand_as(keys)  # the first and the last key are in one block or two
        return cls(at, CopiedBlocks.of(tile.flatten(), keys.flatten() // BAND, grid).to(device))


def copies_in(ids: Int[Tensor, " pos"]) -> tuple[Int[Tensor, " copy"], Int[Tensor, " copy"]]:
    """Find the positions of copies, ascending, and of their originals.

    Args:
        ids: Ids of a text; those below 0 are unknown, and no copies.
    """
    phrase = ids[2:]
    known = ids[2:] >= 0
    for back in (1, 2):
        before = ids[2 - back : len(ids) - back]
        phrase, known = phrase + (before << back * _ID_BITS), known & (before >= 0)
    order = phrase.argsort(stable=True)  # equal phrases are beside each other, in the order of the text
    is_copy = (phrase[order].diff() == 0) & (order.diff() >= FAR) & known[order[1:]]
    place = order[1:][is_copy].sort()
    return place.values + 2, order[:-1][is_copy][place.indices] + 2
