"""Step 6, copies of a token, projected on each spike's direction: they may converge in one spike and not in another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.files.progress import Progress, silent
from sinkscope.hooks.trace.run import trace
from sinkscope.models.target import Target
from sinkscope.sinks.spikes.records import Copies
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.tokens import TokenRows, repeated

FIRST_LENGTH = 128  # copies of the first pass; their number doubles
AT_ONCE = 1 << 24  # elements of the widest activation of a pass


@torch.no_grad()
def along_spikes(target: Target, spikes: Sequence[Spike], rows: TokenRows) -> list[Float[Tensor, "row pos"]]:
    """Projection of every position on each spike's direction after its peak, as a share of the spike."""
    site = "blocks.{}.hook_resid_post"
    found: list[list[Tensor]] = [[] for _ in spikes]
    for some in rows.split(max(1, AT_ONCE // (rows.shape[1] * target.d_mlp))):
        states = trace(target, some, [site.format(spike.peak) for spike in spikes], batch_size=len(some))
        for spike, along in zip(spikes, found, strict=True):
            along.append(spike.along(states[site.format(spike.peak)].float().cpu()))
    return [torch.cat(along) for along in found]


def half_reached(along: Float[Tensor, " copy"]) -> int | None:
    """Return the first number of copies that reaches half of the first token's projection, as does the next.

    It is None if no number does.
    """
    reaches = along >= 0.5
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
    """What copies of each token reach in each spike, in one causal pass of a length that doubles up to the limit.

    Args:
        target: The model.
        spikes: Spikes of the first token.
        tokens: Ids of the tokens.
        before: What stands before the copies; its first token is the one that they are compared with.
        limit: Largest number of copies.
        progress: Called after each pass.

    Returns:
        Of each spike, a record of each token.
    """
    found: dict[tuple[int, int], Copies] = {}
    waiting, length = list(tokens), min(FIRST_LENGTH, limit)
    while waiting and spikes:
        each = along_spikes(target, spikes, repeated(before, waiting, length))
        for number, rows in enumerate(each):
            for token, row in zip(waiting, rows, strict=True):
                own = row[len(before) :] / row[0]
                half, word = half_reached(own), target.tokenizer.decode([token])
                found[number, token] = Copies(word, half, float(own[0]), float(own[-1]), length)
        progress("copies", length, limit)
        if length == limit:
            break
        waiting = [token for token in waiting if any(found[n, token].half is None for n in range(len(spikes)))]
        length = min(2 * length, limit) if target.resident else limit
    return [tuple(found[number, token] for token in tokens) for number in range(len(spikes))]
