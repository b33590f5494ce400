"""Sequences of an attack: how many of their positions have the spike, also under a patch (Yona et al., 5.2 and 5.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sinkscope.hooks.edit import SinkPatch
from sinkscope.hooks.edit.base import under
from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.models.draws import draws, some_of
from sinkscope.sinks.attack.clusters import TokenClusters
from sinkscope.sinks.patch.patches import patch_of
from sinkscope.sinks.spikes.copies import along_spikes
from sinkscope.sinks.spikes.spike import Measured
from sinkscope.sinks.thresholds import HALF
from sinkscope.sinks.tokens import TokenRows


@dataclass(frozen=True)
class Attempt:
    """Sequences of one source, with or without a patch.

    Attributes:
        source: "cluster": drawn from one cluster each, the clusters in turn; "random": drawn from all tokens.
        patch: Whether the neurons that the spike needs are held at their neutral values.
        positions: Share of positions that reach half of the first token's projection, mean over sequences. The first
            position of all does not count, because any token there is a first token.
        margin: Two standard errors over sequences. None: fewer than three sequences.
    """

    source: str
    patch: bool
    positions: float
    margin: float | None


def draw_sequences(pools: Sequence[Sequence[int]], length: int, count: int, seed: int) -> TokenRows:
    """Draw `count` sequences of distinct tokens, each from one large enough cluster, these taken in turn."""
    generator = draws(seed, f"attacks of {length} tokens")
    large = [pool for pool in pools if len(pool) >= length]
    return torch.tensor([some_of(large[number % len(large)], length, generator) for number in range(count)])


def pools_of(setup: Setup, clusters: TokenClusters) -> list[list[int]]:
    """Return the ids of all tokens, then of those of each cluster, without special tokens."""
    left_out = {*setup.tokenizer.all_special_ids, setup.bos}
    return [[token for token in ids if token not in left_out] for ids in clusters.pools]


def run_attempts(setup: Setup, measured: Measured, rows: Mapping[str, TokenRows]) -> tuple[Attempt, ...]:
    """Run sequences of each source without BOS, with and without the patch.

    Args:
        setup: The model and its text.
        measured: The spike.
        rows: The sequences.
    """
    target, patches = setup.target, list[SinkPatch | None]([None])
    if target.resident:
        patches.append(patch_of(measured))
    attempts: list[Attempt] = []
    for source, ids in rows.items():
        for patch in patches:
            with under(patch, target):
                (along,) = along_spikes(target, [measured.spike], ids)
            shares = (along[:, 1:] >= HALF).float().mean(1)
            margin = margin_of(shares.numpy())
            attempts.append(Attempt(source, patch is not None, float(shares.mean()), margin))
            setup.progress("attacks", len(attempts), len(rows) * len(patches))
    return tuple(attempts)
