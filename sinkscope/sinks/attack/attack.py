"""Sequences without repeated tokens whose positions become sinks, how often, and under patches (Yona et al., 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import plotly.express as px
import plotly.graph_objects as go
from pydantic import Field

from sinkscope.measure import Option, Result, Setup, Whole, measurement
from sinkscope.results.claims import Claims
from sinkscope.results.parts import Head
from sinkscope.results.style import figure_of
from sinkscope.results.tables import Table
from sinkscope.sinks.attack.attempts import Attack, Attempt, attack_patches, attempts_of
from sinkscope.sinks.attack.clusters import TokenClusters, find_clusters
from sinkscope.sinks.chunks import Resume
from sinkscope.sinks.spikes.steps import NO_FIRST_SPIKE, first_spike
from sinkscope.sinks.tokens import vocabulary


@dataclass(frozen=True, kw_only=True)
class ClusterAttack(Result):
    """How often sequences without a repeated token make norm spikes, and what patches do to them.

    A position succeeds if it reaches half of the first token's projection on the direction of the spike that most heads
    read. The model's position 0 does not count, because any token there is a first token. Patches are tried if a neuron
    is causal and the model is in memory.

    Attributes:
        clusters: The head of layer 0 that serves each token. None if no neurons are known.
        instead: What there is instead of a finding.
        attempts: What the sequences do.
        claims: What the tokens do in the longest sequences without BOS; and what the heads of the clusters do.
    """

    glossary: ClassVar = {
        "context": "what stands before: BOS or no BOS",
        "length": "tokens of the sequence",
    }
    percent = ("positions", "attention")

    clusters: TokenClusters | None = None
    instead: str | None = None
    attempts: tuple[Attempt, ...] = ()
    claims: Claims = ()

    def rows(self) -> Table:
        """One row per patch, context, length and source; without an attack, one per head that serves tokens."""
        rows: Table = [vars(attempt) for attempt in self.attempts]
        if not rows and self.clusters is not None:
            for head, ids in zip(self.clusters.heads, self.clusters.pools[1:], strict=True):
                rows.append({"head": str(Head(0, head)), "tokens": len(ids)})
        return rows


def draw(result: ClusterAttack) -> go.Figure:
    """Draw the success of the attack by length, a panel per patch and context; without an attack, the clusters."""
    if not result.attempts:
        fig = px.bar(result.rows() or {"head": [], "tokens": []}, x="head", y="tokens")
        return figure_of(fig, result, width=1200, height=480)
    axes: dict[str, Any] = {"x": "length", "y": "positions", "facet_col": "context", "facet_row": "patch"}
    fig = px.line(
        result.rows(), render_mode="svg", **axes, color="source", log_x=True, markers=True, range_y=(-0.06, 1.06)
    )
    return figure_of(fig, result, width=1200, height=980, legend=-0.08)


@measurement(
    group="Repetition",
    help="Make sinks with different tokens that one head marks.",
    figure=draw,
)
def attack(
    setup: Setup,
    *,
    tokens: Annotated[Sequence[str] | None, Option("--tokens", metavar="A,B,...", reads="commas")] = None,
    lengths: Annotated[Sequence[Annotated[int, Field(ge=2)]], Field(min_length=1)] = (8, 32, 128),
    sequences: Whole = 32,
    resume: Resume = None,
) -> ClusterAttack:
    """Find the head of layer 0 that marks each token, and make norm spikes with different tokens of one head.

    First, every token stands alone, and all heads of layer 0 but one are held at their mean over later positions of
    natural text: a token belongs to the cluster of the head that by itself fires the sink neuron. Then sequences of
    different tokens of one cluster are tried after BOS and without it, beside random tokens, and also under the paper's
    patch, ours, and a patch of random neurons. Yona et al. 2025 (section 5.2, appendix B) show two such sequences
    without a success rate. All of this is about tokens that stand first, so there is no attack on a spike elsewhere.

    Args:
        tokens: Tokens to cluster and to attack with. By default the whole vocabulary.
        lengths: Tokens per sequence. Those that no cluster has, or that the context does not hold, are left out.
        sequences: Sequences of each kind and length; 0 finds the clusters only.
        resume: Folder that keeps finished parts, so that an interrupted run can continue.

    Example:
        sinkscope attack --model llama-2-7b --length 8 --sequences 100
    """
    made, everyone = first_spike(setup), vocabulary(setup.target, tokens)
    if made is None:
        return ClusterAttack(instead=f"{NO_FIRST_SPIKE}, so there is nothing to attack; see `circuit`.")
    clusters, claims = find_clusters(setup, made.largest, everyone, resume)
    unneeded = (
        f"with all of them at their mean, {clusters.unneeded:.0%} of {len(everyone):,} tokens fire {clusters.neuron}"
    )
    if not claims:
        return ClusterAttack(clusters=clusters, instead=f"No head of layer 0 marks a token by itself: {unneeded}.")
    result = ClusterAttack(clusters=clusters, claims=claims)
    if sequences and max(map(len, clusters.pools[1:])) < 2:
        return replace(result, instead=f"No cluster has two tokens, so no sequence was tried: {unneeded}.")
    if sequences:
        tries = Attack(setup, made.spike, attack_patches(setup))
        attempts, claim = attempts_of(tries, clusters, lengths, sequences)
        result = replace(result, attempts=attempts, claims=(claim, *claims))
    return result
