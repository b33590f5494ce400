"""Copies of a token, projected on each spike's direction: they may converge in one spike and not in another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.files.progress import Progress, silent
from sinkscope.hooks.trace import trace
from sinkscope.measure.setup import rows_at_once
from sinkscope.models.target import Target
from sinkscope.sinks.spikes.records import Copies
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.thresholds import HALF
from sinkscope.sinks.tokens import TokenRows, repeated

FIRST_LENGTH = 128  # copies of the first pass; their number doubles


@torch.no_grad()
def along_spikes(target: Target, spikes: Sequence[Spike], rows: TokenRows) -> list[Float[Tensor, "row pos"]]:
    """Project every position on each spike's direction after its peak, as a share of the spike."""

    def project(states: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos spike"]:
        return torch.stack([spike.along(states.float().cpu()) for spike in spikes], -1)

    sites = [f"blocks.{spike.peak}.hook_resid_post" for spike in spikes]
    along = trace(target, rows, sites, project, batch_size=rows_at_once(rows.shape[1], target.d_mlp))
    return [along[site][..., number] for number, site in enumerate(sites)]


def half_reached(along: Float[Tensor, " copy"]) -> int | None:
    """Return the first number of copies that reaches half of the first token's projection and stays there for the next.

    None: no number does.
    """
    reaches = along >= HALF
    reaches[:-1] &= reaches[1:].clone()
    reached = reaches.nonzero().flatten()
    if not len(reached):
        return None
    return int(reached[0]) + 1


def copies_of(
    target: Target,
    spikes: Sequence[Spike],
    tokens: Sequence[int],
    before: Sequence[int],
    limit: int,
    progress: Progress = silent,
) -> list[tuple[Copies, ...]]:
    """Measure what copies of each token reach in each spike, in causal passes whose length doubles up to the limit.

    Args:
        target: The model.
        spikes: Spikes of the first token.
        tokens: Ids of the tokens.
        before: What stands before the copies; copies are compared with its first token.
        limit: Largest number of copies.
        progress: Called after each pass.

    Returns:
        A record of each token for each spike.
    """
    found: dict[int, list[Copies]] = {}
    waiting, length = list(tokens), min(FIRST_LENGTH, limit)
    while waiting and spikes:
        each = along_spikes(target, spikes, repeated(before, waiting, length))
        for number, token in enumerate(waiting):
            found[token] = []
            for along in each:
                own, word = along[number, len(before) :] / along[number, 0], target.tokenizer.decode([token])
                found[token].append(Copies(word, half_reached(own), float(own[0]), float(own[-1]), length))
        progress("copies", length, limit)
        if length == limit:
            break
        waiting = [token for token in waiting if any(one.half is None for one in found[token])]
        length = min(2 * length, limit) if target.resident else limit
    return [tuple(found[token][number] for token in tokens) for number in range(len(spikes))]
