"""Where a text copies itself from far away, and which blocks of keys its queries then need.

Heads that continue a repetition attend to the token after the original, which hardly any other query needs, so that a
sample of queries says little of it. Two real models lost most there. Copies are found in the ids alone:

1. A token is a *copy* if it and the two before it also stood, in this order, at least 256 tokens before. Its original
   is the latest such place.
2. All heads see, from the tile of a copy's query, the blocks that hold the keys from one before to two after the last
   token of the original: the next token is the second of these.
3. Half of the sampled queries are drawn among copies (`sample.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.sparse.bands import BAND, TILE, BlockGrid, CopiedBlocks

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
