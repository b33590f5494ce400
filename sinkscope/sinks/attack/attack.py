"""Sequences without repeated tokens whose positions become sinks, how often, and under patches (Yona et al., 5.2)."""

from __future__ import annotations

import html
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from sinkscope.errors import SinkscopeError, SinkscopeWarning
from sinkscope.hooks.edit import SinkPatch
from sinkscope.measure import Hidden, Option, Result, ScanPart, Setup, Whole, measurement
from sinkscope.models.checks import check_length
from sinkscope.results.claims import Claim, Outcome
from sinkscope.results.notation import head_name
from sinkscope.results.parts import Parts, Tokens, neurons_of
from sinkscope.results.result import Number
from sinkscope.results.style import figure_of, long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.attack.clusters import TokenClusters, find_clusters
from sinkscope.sinks.attack.patched import (
    LISTING,
    NONE,
    PATCH,
    PATCHES,
    RANDOM,
    after_attack,
    attack_patches,
    spikes_of,
)
from sinkscope.sinks.attack.sequences import Pools, attack_contexts, drawn_sequences, make_pools, repeated_first
from sinkscope.sinks.chunks import hold_layers
from sinkscope.sinks.find.spikes import sink_neurons
from sinkscope.sinks.find.survey import SinkContext
from sinkscope.sinks.patch.evaluate import under
from sinkscope.sinks.repetition.sweep import claim_of
from sinkscope.sinks.tokens import TokenRows, vocabulary

SOURCES = ("cluster", "random", "repeated")
PATCHED = 16  # sequences of each kind that are run under patches
WHERE = {"BOS": "after BOS", "no BOS": "without BOS", "chat": "after a chat prefix"}
COLUMNS = ("positions", "errors", "most", "attention", "uniform", "divergence")
Cells = Float[np.ndarray, "patch context length source"]


@dataclass(frozen=True, kw_only=True)
class ClusterAttack(Result):
    """How often sequences without a repeated token make norm spikes, and what patches do to them.

    A position succeeds if its norm after the sink layer is at least half of the first token's. The model's position 0
    does not count, because any token there is a first token. Sources: "cluster": drawn from one cluster each, the
    clusters in turn; "random": drawn from all tokens; "repeated": one token repeated. The first 16 sequences of each
    kind are also run under patches, with 16 tokens of typical text after them. NaN: not tried.

    Attributes:
        sink_layer: Layer where norms are read. None if no MLP makes a norm spike; nothing was tried then.
        clusters: The head of layer 0 that serves each token. None if clusters were given, or no neuron is causal.
        absence: What there is instead, if there is no spike at the first token that MLPs make.
        patches: "none"; "Listing 1": the paper's patch as printed, which holds the up factor of the sink neurons at its
            value at the second token, even if this is a sink; "second value": the same with the whole neuron instead of
            one factor; "patch": that of `patch_make`; "random neurons": as many others, held as by "patch". Only "none"
            if no neuron is causal, or if the model is not in memory.
        contexts: What stands before: "BOS", "no BOS", "chat".
        sources: How the sequences were made.
        lengths: Tokens per sequence.
        sequences: Sequences of each kind.
        positions: Mean share of positions that succeed.
        errors: Standard error of this share over sequences.
        most: Share of sequences that succeed at half of their positions or more.
        attention: What the positions that succeed get together from the text after the attack, mean over heads and
            layers after the sink layer.
        uniform: What they would get if all visible positions got the same.
        divergence: Kullback-Leibler divergence in nats of the next token after the attack from that under "patch",
            where it is 0 by definition.
        attacked: Of the cluster attack with most successful positions: what the tokens do, and what patches of the sink
            neurons leave of that.
    """

    glossary: ClassVar = {
        "context": "what stands before: BOS, no BOS, or a chat template",
        "length": "tokens of the sequence",
    }
    percent = ("positions", "errors", "most", "attention", "uniform")
    columns = ("patch", "context", "length", "source", "positions", "attention", "uniform", "divergence")

    sink_layer: int | None
    clusters: TokenClusters | None = None
    absence: str | None = None
    patches: tuple[str, ...] = PATCHES
    contexts: tuple[str, ...]
    sources: tuple[str, ...] = SOURCES
    lengths: Int[np.ndarray, " length"]
    sequences: int
    positions: Cells
    errors: Cells
    most: Cells
    attention: Cells
    uniform: Cells
    divergence: Cells
    attacked: tuple[Claim, ...] = ()

    @property
    def best(self) -> tuple[int, int] | None:
        """Context and length of the cluster attack with most successful positions; None if none was tried."""
        return best_of(self.positions)

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What the heads of the clusters do, what the attack does, and what patches leave of that."""
        return (*(self.clusters.claims if self.clusters is not None else ()), *self.attacked)

    def conclusion(self) -> str:
        """The largest share of positions that succeeds, beside random tokens."""
        if self.absence:
            return self.absence
        if self.best is None and self.clusters is not None:
            return self.clusters.sentence()
        if self.best is None:
            return "No single neuron makes the sink, so there are no clusters to attack with."
        context, length = self.best
        cluster, random, _ = self.positions[0, context, length]
        return (
            f"{self.lengths[length]} different tokens of one cluster make spikes at {cluster:.0%} of their positions "
            f"{WHERE[self.contexts[context]]}, random tokens at {random:.0%}."
        )

    def details(self) -> list[str]:
        """One such token alone, the clusters, and what is left under the patches."""
        lines = []
        if self.attacked:
            single = self.attacked[0].contrasts[0]
            lines.append(f"At {single.value:.0%} of the places one such token behind random ones makes a spike.")
        if self.best is not None and self.clusters is not None:
            lines.append(self.clusters.sentence())
        for claim in self.attacked[1:]:
            intact, random = (contrast.value for contrast in claim.contrasts)
            lines.append(
                f"There are {claim.outcome} at {claim.value:.0%} of the positions (without a patch {intact:.0%}, under "
                f"one of random neurons {random:.0%})."
            )
        return lines

    def rows(self) -> Table:
        """One row per patch, context, length and source; without an attack, one per head that serves tokens."""
        if self.best is not None:
            axes = {"patch": self.patches, "context": self.contexts, "length": self.lengths.tolist()}
            rows = long_table({name: getattr(self, name) for name in COLUMNS}, **axes, source=self.sources)
            return [row for row in rows if row["positions"] is not None]
        if self.clusters is None:
            return []
        found = self.clusters.head
        return [{"layer": 0, "head": head, "tokens": int((found == head).sum())} for head in self.clusters.heads]

    def numbers(self) -> list[Number]:
        """Success of the attack, and the tokens that one head serves."""
        numbers = []
        if self.clusters is not None:
            served = float(np.isfinite(self.clusters.head).mean())
            without = self.clusters.without_heads / len(self.clusters.ids)
            numbers.append(Number("tokens that one head of layer 0 marks", served, without))
        for claim in self.attacked[:1]:
            label = "positions at which a cluster attack makes spikes"
            numbers.append(Number(label, claim.value, claim.control.value, claim.margin))
        return numbers


def draw(result: ClusterAttack) -> go.Figure:
    """Draw the success of the attack by length, a panel per patch and context; without an attack, the clusters."""
    rows = result.rows()
    if result.best is None:
        names = [head_name(0, row["head"]) for row in rows]
        fig = px.bar({"head": names, "tokens": [row["tokens"] for row in rows]}, x="head", y="tokens")
        return figure_of(fig, result, width=1200, height=480)
    for row in rows:
        row["context"], row["patch"] = html.escape(row["context"]), html.escape(row["patch"])
    axes: dict[str, Any] = {"x": "length", "y": "positions", "facet_col": "context", "facet_row": "patch"}
    fig = px.line(rows, render_mode="svg", **axes, color="source", log_x=True, markers=True, range_y=(-0.06, 1.06))
    fig.update_traces(line_width=7, selector={"name": "cluster"})  # one token repeated leaves the same curve
    height = 260 + 180 * len(result.patches)
    return figure_of(fig, result, width=1200, height=height, legend=-75 / height)


def refuse_lengths(*, lengths: Sequence[int], **_: Any) -> None:
    """Refuse an empty list of lengths.

    Raises:
        SinkscopeError: There is no length.
    """
    if not lengths:
        raise SinkscopeError("--length: none is given; give a number of tokens of at least 2")


@measurement(
    group="Repetition",
    order=2,
    help="Make sinks with different tokens that one head marks.",
    scan=ScanPart(5, quick={"sequences": 20}, streams=False),
    figure=draw,
    quick={"lengths": [4], "sequences": 4, "prefix": ""},
    check=refuse_lengths,
)
def attack(
    setup: Setup,
    *,
    clusters: Hidden = None,
    tokens: Annotated[Sequence[str] | None, Option("--tokens", metavar="A,B,...", reads="commas")] = None,
    lengths: Sequence[Annotated[int, Field(ge=2)]] = (8, 32, 128),
    sequences: Whole = 200,
    prefix: str | None = None,
    resume: Annotated[str | Path | None, Option(metavar="DIR", writes="Sequences")] = None,
) -> ClusterAttack:
    """Find the head of layer 0 that marks each token, and make norm spikes with different tokens of one head.

    First, every token stands alone, and all heads of layer 0 but one are held at their mean over later positions of
    natural text: a token belongs to the cluster of the head that by itself fires the sink neuron. Then sequences of
    different tokens of one cluster are tried after BOS, without it, and after a chat prefix, beside random tokens and
    one token repeated, and some of them under the paper's patch, ours, and a patch of random neurons. Yona et al. 2025
    (section 5.2, appendix B) show two such sequences without a success rate. All of this is about tokens that stand
    first, so there is no attack on a spike elsewhere.

    Args:
        clusters: Head -> token ids. By default they are found.
        tokens: Tokens to cluster and to attack with. By default the whole vocabulary.
        lengths: Tokens per sequence.
        sequences: Sequences of each kind and length; 0 finds the clusters only.
        prefix: Text of the chat before the attack; "" leaves the chat out. By default that of the tokenizer's chat
            template, or of a plain chat.
        resume: Folder that keeps finished parts, so that an interrupted run can continue.

    Example:
        sinkscope attack --model llama-2-7b --length 8 --sequences 100
    """
    target = setup.target
    lengths = sorted(set(lengths))
    setup.record(lengths=lengths, clusters="found" if clusters is None else "given")
    contexts = attack_contexts(setup, prefix)
    before = max(map(len, contexts.values()))
    remedy = "give a smaller --length"
    check_length(target, f"--length {lengths[-1]} behind {before} tokens", lengths[-1] + before, remedy=remedy)
    sink = sink_neurons(setup)
    absence = None
    if sink.made is None:
        absence = sink.absence("there are no sink neurons to attack")
    elif not sink.made.spike.place.is_first:
        absence = f"The norm spike is at {sink.made.spike.place}, and an attack is about tokens that stand first."
    ordinary = vocabulary(target, tokens)
    token_clusters = None
    if clusters is None:
        token_clusters = find_clusters(setup, sink, ordinary, resume)
    if token_clusters is not None:
        clusters = {head: token_clusters.tokens_of(head) for head in token_clusters.heads}
    left_out = {int(token) for token in setup.tokenizer.all_special_ids}
    left_out.update(*contexts.values())
    size = int(target.config.vocab_size)
    pools = make_pools(clusters or {}, size, left_out)
    largest = max(map(len, pools.values()), default=0)
    if 0 < largest < lengths[0] and sequences:
        raise SinkscopeError(
            f"--length {lengths[0]} is more than the {largest} tokens of the largest cluster, and no token is "
            "repeated; give at most that"
        )
    if absence or not pools:
        sequences = 0
    patches = attack_patches(setup) if sequences else {NONE: None}
    table = np.full((len(COLUMNS), len(patches), len(contexts), len(lengths), len(SOURCES)), np.nan)
    claims: tuple[Claim, ...] = ()
    if sequences and sink.made is not None:
        hold_layers(target, sink.made.context.layer)
        everyone = make_pools({-1: ordinary}, size, left_out)
        attempts = Attempts(setup, sink.made.context, contexts, patches, (pools, everyone), lengths, sequences)
        attempts.fill(table)
        best = best_of(table[0])
        if best is not None:
            claims = attempts.claims(best, neurons_of(neuron.site for neuron in sink.neurons))
    return ClusterAttack(
        sink_layer=sink.layer,
        clusters=token_clusters,
        absence=absence,
        patches=tuple(patches),
        contexts=tuple(contexts),
        lengths=np.array(lengths),
        sequences=sequences,
        attacked=claims,
        **dict(zip(COLUMNS, table, strict=True)),
    )


@dataclass(frozen=True)
class Attempts:
    """The sequences that are tried, and what they show.

    Attributes:
        setup: The model and its text.
        context: The model at the place of its spike.
        leads: What stands before, by name.
        patches: The patches, by name.
        pools: The clusters, and all tokens.
        lengths: Tokens per sequence.
        sequences: Sequences of each kind.
    """

    setup: Setup
    context: SinkContext
    leads: Mapping[str, tuple[int, ...]]
    patches: Mapping[str, SinkPatch | None]
    pools: tuple[Pools, Pools]
    lengths: Sequence[int]
    sequences: int

    def drawn(self, length: int) -> list[TokenRows]:
        """Sequences of each source; none if no cluster is large enough."""
        cluster, random = (drawn_sequences(pools, length, self.sequences, self.setup.seed) for pools in self.pools)
        return [cluster, random, repeated_first(cluster)] if len(cluster) else []

    @contextmanager
    def patched(self, patch: SinkPatch | None) -> Iterator[None]:
        """A patch acts. That Listing 1 spreads the sink is measured here, so no warning says it."""
        with under(patch, self.setup.target), warnings.catch_warnings():
            warnings.simplefilter("ignore", SinkscopeWarning)
            yield

    def fill(self, table: Float[np.ndarray, "column patch context length source"]) -> None:
        """Attack, and write what happens into a table."""
        done, whole = 0, sum(self.lengths) * len(self.leads)
        for number, length in enumerate(self.lengths):
            for source, rows in enumerate(self.drawn(length)):
                for place, lead in enumerate(self.leads.values()):
                    table[:, :, place, number, source] = self.shown(lead, rows)
                    done += length
                    self.setup.progress("attacks", done // len(SOURCES), whole)

    def shown(self, lead: Sequence[int], rows: TokenRows) -> Float[np.ndarray, "column patch"]:
        """What sequences do without a patch, and the first of them under each."""
        some = rows[:PATCHED]
        columns = np.full((len(COLUMNS), len(self.patches)), np.nan)
        outputs = []
        for number, patch in enumerate(self.patches.values()):
            with self.patched(patch):
                high = spikes_of(self.context, lead, some if number else rows)
                if len(self.patches) > 1:
                    *columns[3:5, number], output = after_attack(self.setup, self.context, lead, some, high[:PATCHED])
                    outputs.append(output)
            by_row = high.double().mean(1)
            columns[:3, number] = by_row.mean(), by_row.std() / len(high) ** 0.5, (by_row >= 0.5).double().mean()
        for number, output in enumerate(outputs):
            ours = outputs[list(self.patches).index(PATCH)]
            columns[5, number] = functional.kl_div(output, ours, reduction="batchmean", log_target=True)
        return columns

    def claims(self, best: tuple[int, int], neurons: Parts) -> tuple[Claim, ...]:
        """What the tokens of a cluster do in one context and at one length, and what patches leave of that."""
        (where, lead), length = list(self.leads.items())[best[0]], self.lengths[best[1]]
        place = f"{WHERE[where]}, {length} tokens"
        cluster, random, _ = self.drawn(length)
        single = torch.cat([random[:, :-1], cluster[:, -1:]], 1)
        shares = [spikes_of(self.context, lead, rows).float().mean(1) for rows in (cluster, random)]
        shares.insert(1, spikes_of(self.context, lead, single)[:, -1].float())
        spikes = Outcome("spikes", unit="cases")
        claims = [claim_of((Tokens("one cluster", length),), place, spikes, torch.stack(shares))]
        left: dict[str, Tensor] = {}
        for name, patch in self.patches.items():
            with self.patched(patch):
                left[name] = spikes_of(self.context, lead, cluster[:PATCHED]).float().mean(1)
        for name, words in ((LISTING, "Listing 1"), (PATCH, "the patch")) if PATCH in left else ():
            values = torch.stack([left[name], left[NONE], left[RANDOM]])
            claims.append(claim_of(neurons, place, Outcome(f"spikes under {words}", unit="cases"), values))
        return tuple(claims)


def best_of(positions: Cells) -> tuple[int, int] | None:
    """Context and length of the cluster attack with most successful positions; None if none was tried."""
    tried = np.nan_to_num(positions[0, :, :, 0], nan=-1.0)
    if tried.max(initial=-1.0) < 0:
        return None
    context, length = max(np.argwhere(tried == tried.max()).tolist(), key=lambda place: place[1])
    return context, length
