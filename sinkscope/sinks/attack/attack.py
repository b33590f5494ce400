"""Sequences without repeated tokens whose positions become sinks, how often, and under patches (Yona et al., 5.2)."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
import torch
from einops import repeat
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.progress import part_of
from sinkscope.hooks.edit import SinkPatch
from sinkscope.measure import Hidden, Option, Result, ScanPart, Setup, Whole, measurement
from sinkscope.measure.evidence import Evidence
from sinkscope.measure.margin import margin_of
from sinkscope.measure.rate import wilson
from sinkscope.models.checks import check_length
from sinkscope.results.notation import head_name, neuron_name, word_form, word_list
from sinkscope.results.result import Number
from sinkscope.results.style import figure_of, long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.attack.clusters import TokenClusters, find_clusters
from sinkscope.sinks.attack.patched import NONE, PATCH, PATCHES, attack_patches, patched_rows
from sinkscope.sinks.attack.sequences import (
    Pools,
    attack_contexts,
    drawn_sequences,
    make_pools,
    repeated_first,
    round_trip,
)
from sinkscope.sinks.chunks import hold_layers
from sinkscope.sinks.find.layer_scan import norms_after
from sinkscope.sinks.find.spikes import sink_neurons
from sinkscope.sinks.tokens import TokenRows, vocabulary

SUCCESS = 0.5  # share of the first token's norm from which a position counts as a sink
SOURCES = ("cluster", "random", "repeated")
SEQUENCES_AT_ONCE = 64  # sequences per pass
PATCHED = 16  # sequences of each kind that are run under patches


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
        absence: What there is instead, if no MLP makes a norm spike.
        reference: Norm of the first token of typical text in the sink layer.
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
        first: Median number of tokens until the first success. NaN if half of the sequences never succeed.
        round_trip: Share of sequences that keep their ids when they are written as text and tokenized again.
        attention: What the positions that succeed get together from the text after the attack, mean over heads and
            layers after the sink layer.
        uniform: What they would get if all visible positions got the same.
        divergence: Kullback-Leibler divergence in nats of the next token after the attack from that under "patch",
            where it is 0 by definition.
    """

    glossary: ClassVar = {
        "context": "what stands before: BOS, no BOS, or a chat template",
        "length": "tokens of the sequence",
        "most_low": "lower end of the 95 % interval of `most`",
        "most_high": "upper end of that interval",
    }
    percent = ("positions", "most", "most_low", "most_high", "round_trip", "attention", "uniform")
    columns = ("patch", "context", "length", "source", "positions", "attention", "uniform", "divergence")

    sink_layer: int | None
    clusters: TokenClusters | None = None
    absence: str | None = None
    reference: float | None = None
    patches: tuple[str, ...] = PATCHES
    contexts: tuple[str, ...]
    sources: tuple[str, ...] = SOURCES
    lengths: Int[np.ndarray, " length"]
    sequences: int
    positions: Float[np.ndarray, "patch context length source"]
    errors: Float[np.ndarray, "patch context length source"]
    most: Float[np.ndarray, "patch context length source"]
    first: Float[np.ndarray, "patch context length source"]
    round_trip: Float[np.ndarray, "length source"]
    attention: Float[np.ndarray, "patch context length source"]
    uniform: Float[np.ndarray, "patch context length source"]
    divergence: Float[np.ndarray, "patch context length source"]

    @property
    def best(self) -> tuple[int, int] | None:
        """Context and length of the cluster attack with most successful positions; None if none was tried."""
        tried = np.nan_to_num(self.positions[0, :, :, 0], nan=-1.0)
        if tried.max(initial=-1.0) < 0:
            return None
        context, length = max(np.argwhere(tried == tried.max()).tolist(), key=lambda place: place[1])
        return context, length

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
        verdict = "does no better than random tokens"
        if Evidence(float(cluster), float(random)).holds:
            verdict = "works"
        elif cluster > random:
            verdict = "does better than random tokens"
        where = {"BOS": "after BOS", "no BOS": "without BOS", "chat": "after a chat prefix"}[self.contexts[context]]
        return (
            f"The cluster attack {verdict} {where}: {self.lengths[length]} different tokens of one cluster make "
            f"spikes at {cluster:.0%} of their positions, random tokens at {random:.0%}."
        )

    def details(self) -> list[str]:
        """The clusters, and the lengths that were not tried."""
        lines = []
        if self.clusters is not None:
            clusters = self.clusters
            if self.best is not None:
                lines.append(clusters.sentence())
            lines.append(
                f"Each token stands alone; the sink neuron is {neuron_name(*clusters.neuron)}. {clusters.unserved:,} "
                f"of the tokens need several heads together, and {clusters.silent:,} "
                f"{word_form(clusters.silent, 'has', 'have')} no mark."
            )
        untried = self.lengths[np.isnan(self.positions[0, :, :, 0]).all(0)].tolist()
        if self.best is not None and untried:
            lines.append(f"No cluster has enough tokens for sequences of {word_list(untried)}.")
        if self.best is not None and PATCH in self.patches:
            _, listing, _, patch, random = self.positions[:, *self.best, 0]
            lines.append(
                f"There, {listing:.0%} of the positions make spikes under the paper's Listing 1, {patch:.0%} under the "
                f"patch that patch make makes, and {random:.0%} under a patch of random neurons."
            )
        return lines

    def rows(self) -> Table:
        """One row per patch, context, length and source; without an attack, one per head that serves tokens."""
        if self.best is None:
            return self.cluster_rows()
        columns = {
            "positions": self.positions,
            "most": self.most,
            "first": self.first,
            "round_trip": np.broadcast_to(self.round_trip, self.positions.shape),
            "attention": self.attention,
            "uniform": self.uniform,
            "divergence": self.divergence,
        }
        table = []
        axes = {"context": self.contexts, "length": self.lengths.tolist(), "source": self.sources}
        for row in long_table(columns, patch=self.patches, **axes):
            if row["positions"] is not None:
                sequences = self.sequences if row["patch"] == NONE else min(self.sequences, PATCHED)
                interval = wilson(round(row["most"] * sequences), sequences)
                table.append({**row, "most_low": interval.low, "most_high": interval.high})
        return table

    def cluster_rows(self) -> Table:
        """One row per head of layer 0 that serves tokens."""
        table = []
        if self.clusters is not None:
            for head in self.clusters.heads:
                tokens = len(self.clusters.tokens_of(head))
                examples = self.clusters.examples(head)
                table.append({"layer": 0, "head": head, "tokens": tokens, "examples": examples})
        return table

    def numbers(self) -> list[Number]:
        """Success of the attack, and the tokens that one head serves."""
        numbers = []
        if self.clusters is not None:
            served = np.isfinite(self.clusters.head)
            without = self.clusters.without_heads / len(self.clusters.ids)
            margin = margin_of(served)
            numbers.append(Number("tokens that one head of layer 0 marks", float(served.mean()), without, margin))
        if self.best is not None:
            cluster, random, _ = self.positions[0, *self.best].tolist()
            label = "positions at which a cluster attack makes spikes"
            numbers.append(Number(label, cluster, random, 2 * float(self.errors[0, *self.best, 0])))
        return numbers


def draw(result: ClusterAttack) -> go.Figure:
    """Draw the success of the attack by length, a panel per patch and context; without an attack, the clusters."""
    rows = result.rows()
    height = 480
    if result.best is None:
        for row in rows:
            row["head"] = head_name(0, row["head"])
        fig = px.bar(rows or {"head": [], "tokens": []}, x="head", y="tokens")
    else:
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
    (section 5.2, appendix B) show two such sequences without a success rate.

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
    ordinary = vocabulary(target, tokens)
    token_clusters = None
    if clusters is None and sink.layer is not None:
        token_clusters = find_clusters(setup, sink.neurons, ordinary, resume)
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
    if sink.layer is None or not pools:
        sequences = 0
    everyone = make_pools({-1: ordinary}, size, left_out)
    patches = attack_patches(setup) if sequences else {NONE: None}
    shape = len(patches), len(contexts), len(lengths), len(SOURCES)
    positions, errors, most, first, attention, uniform, divergence = np.full((7, *shape), np.nan)
    result = ClusterAttack(
        sink_layer=sink.layer,
        clusters=token_clusters,
        absence=None if sink.made is not None else sink.absence("there are no sink neurons to attack"),
        patches=tuple(patches),
        contexts=tuple(contexts),
        lengths=np.array(lengths),
        sequences=sequences,
        positions=positions,
        errors=errors,
        most=most,
        first=first,
        round_trip=np.full(shape[2:], np.nan),
        attention=attention,
        uniform=uniform,
        divergence=divergence,
    )
    if not sequences:
        return result
    return attacked(setup, result, tuple(contexts.values()), (pools, everyone), tuple(patches.values()))


def attacked(
    setup: Setup,
    result: ClusterAttack,
    leads: Sequence[tuple[int, ...]],
    pools: tuple[Pools, Pools],
    patches: Sequence[SinkPatch | None],
) -> ClusterAttack:
    """Attack with clusters, with random tokens and with repeated ones.

    Args:
        setup: The model and its text.
        result: The lengths and the number of sequences, and the arrays that are filled.
        leads: What stands before.
        pools: The clusters, and all tokens.
        patches: The patches, in the order of the result.
    """
    layer, sequences, lengths = result.sink_layer or 0, result.sequences, result.lengths.tolist()
    hold_layers(setup.target, layer)
    reference = float(norms_after(setup.target, layer, setup.ids[:, :1]).median())
    done, whole = 0, 0
    for length in lengths:
        whole += sum(len(lead) + length for lead in leads) * len(SOURCES) * sequences
    for number, length in enumerate(lengths):
        drawn = drawn_sequences(pools[0], length, sequences, setup.seed)
        if not len(drawn):
            continue
        random = drawn_sequences(pools[1], length, sequences, setup.seed)
        for source, rows in enumerate((drawn, random, repeated_first(drawn))):
            result.round_trip[number, source] = round_trip(setup.tokenizer, rows)
            for context, lead in enumerate(leads):
                tokens = len(rows) * (len(lead) + length)
                inside = part_of(setup.progress, done, tokens, whole)
                done += tokens
                hits = attacked_norms(replace(setup, progress=inside), layer, lead, rows) / reference >= SUCCESS
                cell = context, number, source
                fill(result, (0, *cell), hits, length)
                if PATCH in result.patches:
                    fill_patched(setup, result, cell, (patches, lead, rows[:PATCHED]), SUCCESS * reference)
    return replace(result, reference=reference)


def fill(result: ClusterAttack, cell: tuple[int, ...], hits: Bool[Tensor, "row attacked"], length: int) -> None:
    """Write how often the positions of some sequences succeed into the arrays of a result."""
    by_row = hits.float().mean(1)
    result.positions[cell] = by_row.mean()
    result.errors[cell] = by_row.std() / len(hits) ** 0.5
    result.most[cell] = (by_row >= 0.5).float().mean()
    result.first[cell] = median_first(hits, length - hits.shape[1])


def fill_patched(
    setup: Setup,
    result: ClusterAttack,
    cell: tuple[int, ...],
    attacks: tuple[Sequence[SinkPatch | None], tuple[int, ...], TokenRows],
    least: float,
) -> None:
    """Run sequences under every patch, and write what they show into the arrays of a result.

    Args:
        setup: The model and its text.
        result: The result.
        cell: Context, length and source.
        attacks: The patches, what stands before, and the sequences.
        least: Norm from which a position succeeds.
    """
    patches, lead, rows = attacks
    every = []
    for patch in patches:
        every.append(patched_rows(setup, patch, result.sink_layer or 0, least, lead, rows))
    for place, made in enumerate(every):
        if place:  # without a patch, all sequences were counted
            fill(result, (place, *cell), made.hits, rows.shape[1])
        result.attention[place, *cell] = made.attention.mean()
        result.uniform[place, *cell] = made.uniform.mean()
        result.divergence[place, *cell] = made.divergence(every[result.patches.index(PATCH)])


def attacked_norms(setup: Setup, layer: int, lead: tuple[int, ...], rows: TokenRows) -> Float[Tensor, "row attacked"]:
    """Norms after what stands before; the model's position 0 is left out."""
    before = torch.tensor(lead, dtype=torch.long)
    ids = torch.cat([repeat(before, "pos -> row pos", row=len(rows)), rows], dim=1)
    norms = norms_after(setup.target, layer, ids, SEQUENCES_AT_ONCE, setup.progress, "attacks")
    return norms[:, max(len(lead), 1) :]


def median_first(hits: Bool[Tensor, "row attacked"], skipped: int) -> float:
    """Median number of tokens until the first success; NaN if half of the sequences never succeed.

    Args:
        hits: Which positions succeed.
        skipped: Tokens of a sequence before the first attacked one.
    """
    first = torch.where(hits.any(1), hits.int().argmax(1) + 1.0 + skipped, torch.inf).median()
    return float(torch.where(first.isfinite(), first, torch.nan))
