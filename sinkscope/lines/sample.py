"""The queries from which lines are chosen, and what the choice costs."""

from __future__ import annotations

import random

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.lines.attention import causal_cells

_SEARCH = 4.0  # rows of dense attention that take as long as the choice does for each sampled or checked query
_GPU_START = 7.2e11  # products of numbers in dense attention that take as long as 8 ms of launching kernels
_GPU_ROWS = 7_700  # rows of dense attention that take as long as the choice does for a head besides that


def sample_queries(queries: int, sample: int, seed: int = 0) -> Int[Tensor, " row"]:
    """Indices of the sampled queries, ascending."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(queries, generator=generator)[:sample].sort().values


def choice_cost(query: Float[Tensor, "head query d_head"], keys: int, sample: int, checked: int = 0) -> float:
    """Time to choose lines as a share of the time of dense attention; above 1, no choice can pay.

    On a CPU and at 2,048 to 32,768 keys, choosing takes as long as 4 rows of dense attention for every query that is
    sampled or checked if the lines of a head are hard to find, 2.4 if they are found at once, and 1.3 if a head is soon
    seen to be flat (`experiments.bench_loopserve`). On an H100, everything that `LoopServe` does to a prompt besides
    attention took 10 and 20 ms a layer of 32 heads at 16,384 and 32,768 keys, and the choice alone 16 and 22 ms at
    65,536 and 131,072 (`experiments.gpu.loopserve`); dense attention is so fast there that this pays from about 43,000
    keys on. Slower devices gain earlier.
    """
    heads, queries, width = query.shape
    cells = causal_cells(queries, keys)
    if query.is_cuda:
        return (_GPU_START / (heads * width) + _GPU_ROWS * keys) / cells
    read = min(sample, queries) + min(checked, queries)
    return _SEARCH * read * keys / cells


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
