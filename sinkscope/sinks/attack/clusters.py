"""Which head of the first layer marks each token as first (Yona et al. 2025, section 5.2 and appendix B)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int

from sinkscope.measure import Setup
from sinkscope.sinks.first_tokens import FirstTokens
from sinkscope.sinks.spikes.spike import Measured
from sinkscope.sinks.thresholds import HALF
from sinkscope.sinks.tokens import PerToken, hold_layers, token_texts

TOKENS = 128  # tokens of one pass; each takes two more rows than layer 0 has heads


@dataclass(frozen=True)
class TokenClusters:
    """For every token the head of layer 0 that by itself gives it the spike when the token stands first.

    The other heads of layer 0 are held at their mean over ordinary positions of typical text.

    Attributes:
        tokens: The tokens.
        ids: Their ids.
        has: Whether the token has the spike in the intact model: it reaches half of the first token's projection.
        unneeded: Whether it has the spike without any head of layer 0.
        head: The head that serves the token. NaN if no single head does, or if none is needed.
        another: Share of tokens that need a head and have the spike with the median one. None: there is no other head.
    """

    tokens: tuple[str, ...]
    ids: Int[np.ndarray, " token"]
    has: Bool[np.ndarray, " token"]
    unneeded: Bool[np.ndarray, " token"]
    head: PerToken
    another: float | None

    @property
    def served(self) -> Bool[np.ndarray, " token"]:
        """Return whether one head is enough for the token, and one is needed."""
        return np.isfinite(self.head)

    @property
    def heads(self) -> list[int]:
        """Return the heads that serve tokens."""
        return np.unique(self.head[self.served]).astype(int).tolist()

    @property
    def pools(self) -> list[list[int]]:
        """Return the ids of all tokens, then of those that each head serves."""
        return [self.ids.tolist(), *(self.ids[self.head == head].tolist() for head in self.heads)]


def find_clusters(setup: Setup, measured: Measured, ids: list[int]) -> TokenClusters:
    """Find the head of layer 0 that serves each token, by the spike.

    Args:
        setup: The model and its text.
        measured: The spike of the first token.
        ids: The tokens, which stand alone, thus first.
    """
    first = FirstTokens.of(measured, 0)
    hold_layers(setup.target, measured.spike.peak)

    edits = [first.heads]  # all replaced, then all but each one
    for head in first.heads:
        edits.append(tuple(other for other in first.heads if other != head))

    parts: list[torch.Tensor] = []
    for tokens in torch.tensor(ids).split(TOKENS):
        parts.append(first.along(tokens, edits).cpu().double().round(decimals=4))  # threads may change what is beyond
        setup.progress("clusters", TOKENS * (len(parts) - 1) + len(tokens), len(ids))
    intact, none, alone = np.split(torch.cat(parts, 1).T.numpy(), [1, 2], 1)
    has, unneeded = intact[:, 0] >= HALF, none[:, 0] >= HALF
    head = np.full(len(ids), np.nan)
    another: float | None = None
    if first.heads:
        needing = has & ~unneeded
        served = needing & (alone.max(1) >= HALF)
        head = np.where(served, alone.argmax(1), np.nan)
        if len(first.heads) > 1:
            another = float((needing & (np.median(alone, 1) >= HALF)).mean())
    return TokenClusters(token_texts(setup.target, ids), np.array(ids), has, unneeded, head, another)
