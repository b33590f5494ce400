"""Clusters of tokens that one head of layer 0 marks, and sequences of them whose positions become sinks.

(Yona et al. 2025, section 5.2 and appendix B.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Int
from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit import SinkPatch
from sinkscope.hooks.edit.base import under
from sinkscope.measure import Natural, Result, Setup, Whole, measurement
from sinkscope.measure.margin import SCORES, margin_of
from sinkscope.models.draws import draws, some_of
from sinkscope.models.inputs import check_length
from sinkscope.results.notation import count_of, percent, percent_with_margin
from sinkscope.results.parts import Head
from sinkscope.results.row import Mean, Row, row_beside
from sinkscope.results.style import figure_of
from sinkscope.results.tables import Table
from sinkscope.sinks.first_tokens import along_first, heads_up_to, spike_of
from sinkscope.sinks.spikes.copies import along_spikes
from sinkscope.sinks.spikes.edited import means_of
from sinkscope.sinks.spikes.find import NO_FIRST_SPIKE
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.spikes.spike_circuit import SpikeCircuit
from sinkscope.sinks.thresholds import HALF
from sinkscope.sinks.tokens import (
    PerToken,
    TokenRows,
    hold_layers,
    refuse_n_tokens,
    sample_tokens,
    token_texts,
    vocabulary,
)

LENGTH = 8  # tokens of a sequence
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
        another: Share of tokens that need a head and have the spike with the median head. None: there is no other head.
    """

    tokens: tuple[str, ...]
    ids: Int[np.ndarray, " token"]
    has: Bool[np.ndarray, " token"]
    unneeded: Bool[np.ndarray, " token"]
    head: PerToken
    another: float | None

    @property
    def served(self) -> Bool[np.ndarray, " token"]:
        """Return the tokens that need a head and for which a single head is enough."""
        return np.isfinite(self.head)

    @property
    def heads(self) -> list[int]:
        """Return the heads that serve tokens."""
        return np.unique(self.head[self.served]).astype(int).tolist()


def find_clusters(setup: Setup, spike: Spike, ids: list[int]) -> TokenClusters:
    """Find the head of layer 0 that serves each token, by the spike.

    Args:
        setup: The model and its text.
        spike: The spike of the first token.
        ids: The tokens, which stand alone, thus first.
    """
    heads = heads_up_to(setup.target, 0)
    hold_layers(setup.target, spike.peak)
    means, edits = means_of(spike, heads), [heads]  # all replaced, then all but each one
    for head in heads:
        edits.append(tuple(other for other in heads if other != head))
    parts: list[torch.Tensor] = []
    for tokens in torch.tensor(ids).split(TOKENS):
        along = along_first(spike, tokens, edits, means)
        parts.append(along.double().round(decimals=4))  # threads may change what is beyond
        setup.progress("clusters", TOKENS * (len(parts) - 1) + len(tokens), len(ids))
    intact, none, alone = np.split(torch.cat(parts, 1).T.numpy(), [1, 2], 1)
    has, unneeded = intact[:, 0] >= HALF, none[:, 0] >= HALF
    head = np.full(len(ids), np.nan)
    another: float | None = None
    if heads:
        needing = has & ~unneeded
        served = needing & (alone.max(1) >= HALF)
        head = np.where(served, alone.argmax(1), np.nan)
        if len(heads) > 1:
            another = float((needing & (np.median(alone, 1) >= HALF)).mean())
    return TokenClusters(token_texts(setup.target, ids), np.array(ids), has, unneeded, head, another)


@dataclass(frozen=True)
class Attempt:
    """Sequences of one source, with or without a patch.

    Attributes:
        source: "cluster": each sequence is drawn from a cluster, in turn; "random": from all tokens.
        patch: Whether the neurons that the spike needs are held at their neutral values.
        positions: Share of positions that reach half of the first token's projection, mean over sequences. The first
            position of all does not count, because any token there is a first token.
        margin: Half of the 95 % interval over sequences. None: fewer than three sequences.
    """

    source: str
    patch: bool
    positions: float
    margin: float | None


@dataclass(frozen=True, kw_only=True)
class ClusterAttack(Result):
    """Which tokens a head of layer 0 marks, and how often sequences of different tokens have the spike.

    Attributes:
        spike: The spike of the first token, by its layers. None: no spike with known neurons.
        instead: What there is instead of a finding.
        clusters: The head of layer 0 that serves each token. None if no neurons are known.
        searched: How many tokens they were drawn from.
        n_heads: Heads of layer 0.
        length: Tokens per sequence.
        attempts: What the sequences do.
    """

    glossary: ClassVar = {
        "source": "cluster: different tokens of one cluster; random: different tokens of all",
        "patch": "whether the neurons that the spike needs are patched",
        "positions": "share of positions that reach half of the first token's projection",
        "margin": "half of the 95 % interval over sequences",
    }
    percent = ("positions", "margin")

    spike: str | None
    instead: str | None = None
    clusters: TokenClusters | None = None
    searched: int = 0
    n_heads: int = 0
    length: int = 0
    attempts: tuple[Attempt, ...] = ()

    def conclusion(self) -> str:
        """Say what sequences of one cluster do, if most tokens are in one; or what the clusters are."""
        if self.instead is not None:
            return self.instead
        return self._lines()[0]

    def details(self) -> list[str]:
        """Say what the conclusion does not say."""
        return [line for line in self._lines() if line != self.conclusion()]

    def _lines(self) -> list[str]:
        """Say how many tokens have the spike by one head, in sequences, and without any; the most telling first."""
        clusters, what = self.clusters, f"the spike of {self.spike}"
        if clusters is None:
            return []
        tried = f"{len(clusters.ids):,} tokens"
        if self.searched > len(clusters.ids):
            tried = f"{len(clusters.ids):,} tokens drawn from {self.searched:,}"
        if not clusters.has.any():
            none = f"{_share(clusters.has)} of {tried} have {what} without BOS (the first tokens of texts: 100%)"
            return [f"No head can mark a token: {none}."]
        without, intact = _share(clusters.unneeded), percent(clusters.has.mean())
        if not clusters.heads:
            left = f"{without} have {what} without its {self.n_heads} heads (with them: {intact})"
            return [f"No head of layer 0 marks one of {tried} by itself: {left}."]
        count = count_of(len(clusters.heads), "head")
        is_enough = f"One of {count}" if len(clusters.heads) > 1 else str(Head(0, clusters.heads[0]))
        share = f"{_share(clusters.served)} of {tried}"
        comparison = "layer 0 has no other head to compare with"
        if clusters.another is not None:
            comparison = f"another head: {clusters.another:.0%}"
        lines = [*self._of_sequences(), f"{is_enough} of layer 0 alone gives {share} {what} ({comparison})."]
        unneeded = f"{without} of {tried} have {what} without any head of layer 0 (with them: {intact})."
        if clusters.unneeded.mean() > clusters.served.mean():
            return [unneeded, *reversed(lines)]
        return [*lines, unneeded]

    def _of_sequences(self) -> list[str]:
        """Say how many positions have the spike, beside random tokens and under the patch."""
        made = {(attempt.source, attempt.patch): attempt for attempt in self.attempts}
        if not made:
            return []
        cluster, chance = made["cluster", False], f"random tokens: {made['random', False].positions:.0%}"
        if ("cluster", True) in made:
            chance += f"; patched: {made['cluster', True].positions:.0%}"
        return [
            f"Sequences of {self.length} different tokens of one cluster have the spike of {self.spike} at "
            f"{percent_with_margin(cluster.positions, cluster.margin)} of their positions without BOS ({chance})."
        ]

    def findings(self) -> list[Row]:
        """Return for how many tokens one head is enough, and how often sequences of one cluster have the spike."""
        rows: list[Row] = []
        random = {attempt.patch: attempt.positions for attempt in self.attempts if attempt.source == "random"}
        for attempt in self.attempts:
            if attempt.source == "cluster":
                label = "positions of sequences of one cluster that have the spike" + ", patched" * attempt.patch
                positions = Mean(attempt.positions, attempt.margin, kind="share")
                rows.append(row_beside(label, positions, random.get(attempt.patch), "random tokens"))
        if self.clusters is not None and self.clusters.heads:
            served = self.clusters.served
            share = Mean(float(served.mean()), margin_of(served.astype(float), SCORES), kind="share")
            label = "tokens that have the spike by one head of layer 0"
            rows.append(row_beside(label, share, self.clusters.another, "another head"))
        return rows

    def rows(self) -> Table:
        """Return a row per source and patch; without sequences, one per head that serves tokens."""
        rows: Table = [vars(attempt) for attempt in self.attempts]
        if not rows and self.clusters is not None:
            for head in self.clusters.heads:
                rows.append({"head": str(Head(0, head)), "tokens": int((self.clusters.head == head).sum())})
        return rows


def _share(has: Bool[np.ndarray, " token"]) -> str:
    """Write the share of tokens that have something, with its margin."""
    return percent_with_margin(has.mean(), margin_of(has.astype(float), SCORES))


def draw(result: ClusterAttack) -> go.Figure:
    """Draw the share of positions by source and patch; without sequences, the clusters."""
    if not result.attempts:
        fig = px.bar(result.rows() or {"head": [], "tokens": []}, x="head", y="tokens")
        return figure_of(fig, result, width=1200, height=480)
    rows = [{**row, "patch": "patched" if row["patch"] else "intact"} for row in result.rows()]
    axes: dict[str, Any] = {"x": "source", "y": "positions", "color": "patch"}
    fig = px.bar(rows, **axes, barmode="group", error_y="margin", range_y=(0, 1.06))
    return figure_of(fig.update_yaxes(tickformat=".0%"), result, width=1000, height=480)


def _refuse_unused(*, length: int, sequences: int, **options: Any) -> None:
    refuse_n_tokens(**options)
    if not sequences and length != LENGTH:
        raise SinkscopeError(f"--length {length} has no effect without sequences: leave it out, or --sequences 0")


@measurement(
    figure=draw,
    check=_refuse_unused,
)
def attack(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    n_tokens: Natural | None = None,
    spike: Whole | None = None,
    length: Annotated[int, Field(ge=2)] = LENGTH,
    sequences: Whole = 32,
) -> ClusterAttack:
    """Find the head of layer 0 that marks each token, and make norm spikes with different tokens of one head.

    First, every token stands alone, and all heads of layer 0 but one are held at their mean over ordinary positions of
    typical text: a token belongs to the cluster of the head that by itself gives it the spike. Then sequences of
    different tokens of one cluster are tried without BOS, beside random tokens, and also under the patch of the neurons
    that the spike needs, if the model is in memory. Yona et al. 2025 (section 5.2, appendix B) show two
    such sequences without a success rate. All of this is about tokens that stand first, so there is no attack on a
    spike elsewhere.

    Args:
        tokens: Tokens to cluster and to attack with. By default `n_tokens` tokens of the vocabulary.
        n_tokens: Tokens of the vocabulary, drawn by the seed. By default 256; a larger number than it has is all.
        spike: Number of the spike in `find_sinks`. By default, among the spikes of the first token that need
            neurons, the one that most heads read.
        length: Tokens per sequence.
        sequences: Sequences of each kind; 0 finds the clusters only.
    """
    everyone = vocabulary(setup.target, tokens)
    ids = everyone if tokens else sorted(sample_tokens(everyone, n_tokens or 256, setup.seed))
    if sequences:
        check_length(setup.target, f"--length {length}", length, remedy="give a shorter one")
    chosen = spike_of(setup, spike)
    if chosen is None:
        return ClusterAttack(spike=None, instead=f"{NO_FIRST_SPIKE}, so there is nothing to attack; see `why_sink`.")
    clusters = find_clusters(setup, chosen.spike, ids)
    result = ClusterAttack(
        spike=chosen.name,
        clusters=clusters,
        searched=len(everyone),
        n_heads=setup.n_heads if 0 in setup.target.attending else 0,
        length=length,
    )
    if not sequences or not clusters.heads:
        return result
    every, *pools = pools_of(setup, clusters)
    if max(map(len, pools)) < length:
        few = f"No cluster has {length} tokens (the largest: {max(map(len, pools))}), so no sequence was tried."
        return replace(result, instead=few)
    rows = {}
    for source, some in {"cluster": pools, "random": [every]}.items():
        rows[source] = draw_sequences(some, length, sequences, setup.seed)
    return replace(result, attempts=run_attempts(setup, chosen, rows))


def draw_sequences(pools: Sequence[Sequence[int]], length: int, count: int, seed: int) -> TokenRows:
    """Draw `count` sequences of distinct tokens, in turn from each cluster that is large enough."""
    generator = draws(seed, f"attacks of {length} tokens")
    large = [pool for pool in pools if len(pool) >= length]
    return torch.tensor([some_of(large[number % len(large)], length, generator) for number in range(count)])


def pools_of(setup: Setup, clusters: TokenClusters) -> list[list[int]]:
    """Return the ids of all tokens, then the ids of each cluster, without special tokens."""
    special = [*setup.tokenizer.all_special_ids, *([] if setup.bos is None else [setup.bos])]
    usable = ~np.isin(clusters.ids, special)
    return [
        clusters.ids[usable & some].tolist() for some in (usable, *(clusters.head == head for head in clusters.heads))
    ]


def run_attempts(setup: Setup, chosen: SpikeCircuit, rows: Mapping[str, TokenRows]) -> tuple[Attempt, ...]:
    """Run sequences of each source without BOS, with and without the patch.

    Args:
        setup: The model and its text.
        chosen: The spike, with its writers.
        rows: The sequences.
    """
    target, patches = setup.target, list[SinkPatch | None]([None])
    if target.resident:
        patches.append(chosen.patch)
    attempts: list[Attempt] = []
    for source, ids in rows.items():
        for patch in patches:
            with under(patch, target):
                (along,) = along_spikes(target, [chosen.spike], ids)
            shares = (along[:, 1:] >= HALF).float().mean(1)
            margin = margin_of(shares.numpy(), SCORES)
            attempts.append(Attempt(source, patch is not None, float(shares.mean()), margin))
            setup.progress("attacks", len(attempts), len(rows) * len(patches))
    return tuple(attempts)
