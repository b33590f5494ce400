"""The parts from which the attention of a layer is computed: attention of some queries, and sums along lines."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.engine.attention import attention_probs
from sinkscope.errors import UnsupportedError
from sinkscope.files.records import Natural, check_values

ROWS = 64  # queries whose attention is computed at a time


@dataclass(frozen=True, eq=False)
class Scores:
    """The parts from which the attention scores of one layer and one sequence are computed.

    The choice of lines, and attention along them, are for layers whose attention has no more than the first three.

    Attributes:
        query: Queries after rotary; the last one sees every key.
        key: Keys after rotary; query heads share them in groups.
        scaling: Factor on the scores, as a rule 1 / sqrt(d_head).
        window: Keys this far back and further are not seen. None means all are seen.
        softcap: `cap * tanh(score / cap)` (Gemma 2).
        sinks: A learned logit per head that takes part in the softmax and is then dropped (gpt-oss).
    """

    query: Float[Tensor, "head query d_head"]
    key: Float[Tensor, "kv_head key d_head"]
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " head"] | None = None

    def __repr__(self) -> str:
        """Return what it is, without its numbers."""
        return f"Scores(query={[*self.query.shape]}, key={[*self.key.shape]}, scaling={self.scaling:.4g})"

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return len(self.query)

    @property
    def queries(self) -> int:
        """Number of queries."""
        return self.query.shape[1]

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.key.shape[1]

    @property
    def past(self) -> int:
        """Number of positions before the first query."""
        return self.keys - self.queries

    def check_plain(self) -> None:
        """Refuse what the choice of lines, and attention along them, would leave out.

        Raises:
            UnsupportedError: There is a window, a soft cap or learned sinks.
        """
        if self.window is not None or self.softcap is not None or self.sinks is not None:
            raise UnsupportedError(
                "this layer's attention has a window, a soft cap or learned sinks, which lines do not have: choose "
                "them for layers without, or give Scores of query, key and scaling alone"
            )

    def part(self, start: int, stop: int) -> Scores:
        """Take the scores of the queries at positions `start` to `stop` and of all keys that these see."""
        return replace(self, query=self.query[:, start - self.past : stop - self.past], key=self.key[:, :stop])


def attention_of(
    scores: Scores, rows: Int[Tensor, " row"], visible: Bool[Tensor, "head row key"] | None = None
) -> Float[Tensor, "head row key"]:
    """Compute causal attention of some queries in float32.

    Args:
        scores: The scores of a layer.
        rows: Indices of the queries.
        visible: Which keys they see. None: all up to their own, or within the window.
    """
    rows = rows.to(scores.query.device, non_blocking=True)
    if visible is None:
        key = torch.arange(scores.keys, device=rows.device)
        at = (rows + scores.past)[:, None]
        visible = ((key <= at) & (key > at - (scores.window or scores.keys)))[None]
    return attention_probs(
        scores.query[None, :, rows],
        scores.key[None],
        visible[None],
        scaling=scores.scaling,
        softcap=scores.softcap,
        sinks=scores.sinks,
    )[0]


def slash_sums(probs: Float[Tensor, "head row key"], at: Int[Tensor, " row"]) -> Float[Tensor, "head key"]:
    """Return the sum of every slash line, by offset, in the rows at positions `at`."""
    falling = torch.zeros_like(probs[:, 0])  # from the largest offset to 0, so that no row has to be turned round
    for number, row in enumerate(at.tolist()):
        falling[:, probs.shape[2] - 1 - row :] += probs[:, number, : row + 1]
    return falling.flip(1)


def sample_queries(queries: int, sample: int, seed: int) -> Int[Tensor, " row"]:
    """Draw indices of the sampled queries, ascending.

    Args:
        queries: Number of queries.
        sample: Number of sampled queries; all are taken if there are fewer.
        seed: Seed of the draws.
    """
    check_values(Natural, sample=sample)
    order = torch.randperm(queries, generator=torch.Generator().manual_seed(seed))
    return order[:sample].sort().values


def line_sums(scores: Scores, *, since: int = 0) -> Float[Tensor, "head kind key"]:
    """Sum the attention weight of every vertical and every slash line over the queries.

    Args:
        scores: The scores of one layer.
        since: Keys before this one, which no query stands before, take part in the softmax only; keys count from it.

    Returns:
        The sums by key, and those by offset, float32. Each kind sums to the number of queries minus the weight of
        learned sinks and of keys before `since`.
    """
    sums = torch.zeros(scores.heads, 2, scores.keys - since, device=scores.query.device)
    for start in range(scores.past, scores.keys, ROWS):
        part = scores.part(start, min(start + ROWS, scores.keys))
        rows = torch.arange(part.queries, device=sums.device)
        probs = attention_of(part, rows)[:, :, since:]
        n_keys = probs.shape[2]
        sums[:, 0, :n_keys] += probs.sum(1)
        sums[:, 1, :n_keys] += slash_sums(probs, rows + part.past - since)
    return sums
