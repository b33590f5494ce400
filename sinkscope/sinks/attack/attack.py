"""Sequences without repeated tokens whose positions become sinks, how often, and under patches (Yona et al., 5.2)."""

from __future__ import annotations

import html
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any, ClassVar

import plotly.express as px
import plotly.graph_objects as go
from pydantic import Field

from sinkscope.errors import SinkscopeError, SinkscopeWarning
from sinkscope.measure import Hidden, Option, Result, Setup, Whole, measurement
from sinkscope.results.claims import Claims
from sinkscope.results.style import figure_of
from sinkscope.results.tables import Table
from sinkscope.sinks.attack.attempts import (
    NONE,
    SOURCES,
    Attempt,
    Attempts,
    attack_contexts,
    attack_patches,
    drawn_sources,
    make_pools,
)
from sinkscope.sinks.attack.clusters import TokenClusters, find_clusters
from sinkscope.sinks.chunks import Resume, hold_layers
from sinkscope.sinks.find.spikes import MadeSpike, sink_spike, without_spike
from sinkscope.sinks.tokens import vocabulary


@dataclass(frozen=True, kw_only=True)
class ClusterAttack(Result):
    """How often sequences without a repeated token make norm spikes, and what patches do to them.

    A position succeeds if its norm after the sink layer is at least half of the first token's. The model's position 0
    does not count, because any token there is a first token. Sources: "cluster": drawn from one cluster each, the
    clusters in turn; "random": drawn from all tokens; "repeated": one token repeated. The first 16 sequences of each
    kind are also run under patches, if a neuron is causal and the model is in memory, with 16 tokens of typical text
    after them.

    Attributes:
        sink_layer: Layer where norms are read. None if no MLP makes a norm spike; nothing was tried then.
        clusters: The head of layer 0 that serves each token. None if clusters were given, or no neuron is causal.
        instead: What there is instead of a finding.
        sequences: Sequences of each kind.
        attempts: What they do.
        attacked: Of the cluster attack with most successful positions: what the tokens do, and what patches of the sink
            neurons leave of that.
    """

    glossary: ClassVar = {
        "context": "what stands before: BOS or no BOS",
        "length": "tokens of the sequence",
    }
    percent = ("positions", "most", "attention", "uniform")
    table_of = "attempts"
    columns = ("patch", "context", "length", "source", "positions", "attention", "uniform", "divergence")

    sink_layer: int | None
    clusters: TokenClusters | None = None
    instead: str | None = None
    sequences: int = 0
    attempts: tuple[Attempt, ...] = ()
    attacked: Claims = ()

    @property
    def claims(self) -> Claims:
        """What the attack does, what patches leave of that, and what the heads of the clusters do."""
        return (*self.attacked, *(self.clusters.claims if self.clusters is not None else ()))

    def rows(self) -> Table:
        """One row per patch, context, length and source; without an attack, one per head that serves tokens."""
        if not self.attacked:
            return [] if self.clusters is None else self.clusters.rows()
        return super().rows()


def draw(result: ClusterAttack) -> go.Figure:
    """Draw the success of the attack by length, a panel per patch and context; without an attack, the clusters."""
    rows = result.rows()
    if not result.attacked:
        fig = px.bar(rows or {"head": [], "tokens": []}, x="head", y="tokens")
        return figure_of(fig, result, width=1200, height=480)
    for row in rows:
        row |= {name: html.escape(row[name]) for name in ("patch", "context", "source")}
    axes: dict[str, Any] = {"x": "length", "y": "positions", "facet_col": "context", "facet_row": "patch"}
    fig = px.line(rows, render_mode="svg", **axes, color="source", log_x=True, markers=True, range_y=(-0.06, 1.06))
    fig.update_traces(line_width=7, selector={"name": "cluster"})  # one token repeated leaves the same curve
    height = 260 + 180 * len({one.patch for one in result.attempts})
    return figure_of(fig, result, width=1200, height=height, legend=-75 / height)


@measurement(
    group="Repetition",
    help="Make sinks with different tokens that one head marks.",
    figure=draw,
)
def attack(
    setup: Setup,
    *,
    clusters: Hidden = None,
    tokens: Annotated[Sequence[str] | None, Option("--tokens", metavar="A,B,...", reads="commas")] = None,
    lengths: Annotated[Sequence[Annotated[int, Field(ge=2)]], Field(min_length=1)] = (8, 32, 128),
    sequences: Whole = 200,
    resume: Resume = None,
) -> ClusterAttack:
    """Find the head of layer 0 that marks each token, and make norm spikes with different tokens of one head.

    First, every token stands alone, and all heads of layer 0 but one are held at their mean over later positions of
    natural text: a token belongs to the cluster of the head that by itself fires the sink neuron. Then sequences of
    different tokens of one cluster are tried after BOS and without it, beside random tokens and one token repeated, and
    some of them under the paper's patch, ours, and a patch of random neurons. Yona et al. 2025 (section 5.2, appendix
    B) show two such sequences without a success rate. All of this is about tokens that stand first, so there is no
    attack on a spike elsewhere.

    Args:
        clusters: Head -> token ids. By default they are found.
        tokens: Tokens to cluster and to attack with. By default the whole vocabulary.
        lengths: Tokens per sequence.
        sequences: Sequences of each kind and length; 0 finds the clusters only.
        resume: Folder that keeps finished parts, so that an interrupted run can continue.

    Example:
        sinkscope attack --model llama-2-7b --length 8 --sequences 100
    """
    lengths = sorted(set(lengths))
    setup.record(lengths=lengths, clusters="found" if clusters is None else "given")
    contexts = attack_contexts(setup, lengths[-1])
    made, ordinary, found = sink_spike(setup), vocabulary(setup.target, tokens), None
    if clusters is None:
        found = find_clusters(setup, made, ordinary, resume)
        clusters = {} if found is None else {head: found.tokens_of(head) for head in found.heads}
    result = ClusterAttack(
        sink_layer=None if made is None else made.scan.layer,
        clusters=found,
        instead=_instead(setup, made, found),
    )
    size = int(setup.target.config.vocab_size)
    left_out = {*setup.tokenizer.all_special_ids, *chain(*contexts.values())}
    pools, everyone = (make_pools(each, size, left_out) for each in (clusters, {-1: ordinary}))
    if made is None or not made.spike.place.is_first or not pools or not sequences:
        return result
    drawn = [drawn_sources(pools, everyone, length, sequences, setup.seed) for length in lengths]
    if not drawn[0]:
        raise SinkscopeError(
            f"--length {lengths[0]} is more than the {max(map(len, pools))} tokens of the largest cluster, and no "
            "token is repeated; give at most that"
        )
    return _attacked(
        replace(result, sequences=sequences), Attempts(setup, made.scan, contexts, attack_patches(setup), drawn)
    )


def _instead(setup: Setup, made: MadeSpike | None, clusters: TokenClusters | None) -> str | None:
    """What there is instead of clusters of tokens; None if there are some."""
    if made is None:
        return without_spike(setup, "there are no sink neurons to attack")
    if not made.spike.place.is_first:
        return f"MLPs make a norm spike at {made.spike.place}, and an attack is about tokens that stand first."
    if clusters is None or not clusters.heads:
        return "No single neuron makes the sink, or no single head of layer 0 marks a token: there are no clusters."
    return None


def _attacked(result: ClusterAttack, attempts: Attempts) -> ClusterAttack:
    """What the attempts show; the claims are of the cluster attack with most successful positions."""
    hold_layers(attempts.setup.target, attempts.scan.layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SinkscopeWarning)  # that Listing 1 spreads the sink is measured here
        made = attempts.made()
    tried = [one for one in made if (one.patch, one.source) == (NONE, SOURCES[0])]
    best = max(tried, key=lambda one: (one.positions, one.length))
    return replace(result, attempts=made, attacked=attempts.claims(best), instead=None)
