"""Clusters of tokens that one head of layer 0 marks, and sequences of them whose positions become sinks.

1. Every token stands alone, all heads of layer 0 but one held at their mean: it is in the cluster of the head that by
   itself gives it the spike.
2. Sequences of different tokens of one cluster, and of all tokens, are read without BOS, intact and patched.

(Yona et al. 2025, section 5.2 and appendix B.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Int, Shaped
from pydantic import Field

from sinkscope.errors import SinkscopeError, UnsupportedError, warn
from sinkscope.hooks.edit import SinkPatch
from sinkscope.hooks.edit.base import under
from sinkscope.measure import Mean, Natural, Result, Row, Setup, Whole, measurement
from sinkscope.measure.margin import SCORES, margin_of
from sinkscope.models.draws import draws, some_of
from sinkscope.models.inputs import check_length
from sinkscope.results.notation import Head, percent
from sinkscope.results.row import row_of
from sinkscope.results.style import BLUE, GREY, bars, figure_of
from sinkscope.sinks.repeat import along_spikes
from sinkscope.sinks.spikes.asked import SpikeCircuit
from sinkscope.sinks.spikes.edited import means_of
from sinkscope.sinks.spikes.find import NO_FIRST_SPIKE, spike_of
from sinkscope.sinks.spikes.marks import along_first, heads_up_to
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.thresholds import HALF
from sinkscope.sinks.tokens import PerToken, TokenRows, sample_tokens, single_token

TOKENS = 128  # tokens of one pass; each takes two more rows than layer 0 has heads
SERVED = "tokens that have the spike by one head of layer 0"
UNNEEDED = "without any head"
INTACT = "with all heads"
POSITIONS = "positions of sequences of one cluster that have the spike"


@dataclass(frozen=True, kw_only=True)
class ClusterAttack(Result):
    """Which tokens a head of layer 0 marks, and how often sequences of different tokens have the spike.

    A token has the spike if it reaches half of the first token's projection on its direction.

    Attributes:
        spike: The spike of the first token, by its layers.
        length: Tokens per sequence.
        ids: The tokens.
        head: The head of layer 0 that by itself gives each token the spike. NaN: no single head does, or none is
            needed.
        clusters: How many tokens have the spike by one head, with all heads, and without any; and by which head.
        attempts: In how many positions sequences of one cluster have the spike, beside sequences of all tokens: intact,
            and with the neurons that it needs held at their neutral values. The first position of all does not
            count, because any token there is a first token.
    """

    columns = ("name", "share", "control", "tokens")

    spike: str
    length: int
    ids: Int[np.ndarray, " token"]
    head: PerToken
    clusters: tuple[Row, ...]
    attempts: tuple[Row, ...] = ()

    @property
    def heads(self) -> list[int]:
        """The heads that serve tokens."""
        return np.unique(self.head[np.isfinite(self.head)]).astype(int).tolist()

    def conclusion(self) -> str:
        """Say what sequences of one cluster do, or what the clusters are."""
        served, _, unneeded = (row.numbers["share"] for row in self.clusters[:3])
        tried = f"{len(self.ids):,} tokens"
        spike = f"the spike of {self.spike}"
        if self.attempts:
            share = self.attempts[0].numbers["share"]
            control = percent(self.attempts[0].get("control"))
            patched = "".join(f"; patched: {percent(row.get('share'))}" for row in self.attempts[1:])
            where = f"{share} of their positions without BOS (random tokens: {control}{patched})"
            return f"Sequences of {self.length} different tokens of one cluster have {spike} at {where}."
        if not self.heads:
            return f"No head of layer 0 marks one of {tried} by itself: {unneeded} have {spike} without any of them."
        other = self.clusters[0].numbers.get("control", "none")
        return f"One head of layer 0 alone gives {served} of {tried} {spike} (another head: {other})."

    def figure(self) -> go.Figure:
        """Draw the share of positions beside that of random tokens, intact and patched; or else the clusters."""
        fig = go.Figure()
        bars(fig, self.attempts, "share", BLUE, "one cluster")
        bars(fig, self.attempts, "control", GREY, "random tokens")
        if not self.attempts:
            bars(fig, self.clusters[3:], "tokens", BLUE)
        return figure_of(fig, self, width=1000, height=480)


@measurement()
def attack(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    n_tokens: Natural | None = None,
    length: Annotated[int, Field(ge=2)] = 8,
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
        length: Tokens per sequence.
        sequences: Sequences of each kind; 0 finds the clusters only.

    Raises:
        SinkscopeError: A number of tokens is given beside tokens, or a word is not one token.
        UnsupportedError: The model has no spike at the first token that needs neurons.
    """
    if tokens and n_tokens is not None:
        raise SinkscopeError("--n-tokens has no effect on tokens that are named: leave it out, or --tokens")
    if tokens:
        ids = list(dict.fromkeys(single_token(setup.tokenizer, token) for token in tokens))
    else:  # every id that both the tokenizer and the embedding know
        everyone = range(min(len(setup.tokenizer), int(setup.target.config.vocab_size)))
        ids = sorted(sample_tokens(list(everyone), n_tokens or 256, setup.seed))
    if sequences:
        check_length(setup.target, f"--length {length}", length, remedy="give a shorter one")
    chosen = spike_of(setup)
    if chosen is None:
        raise UnsupportedError(f"{NO_FIRST_SPIKE}, so there is nothing to attack: see `why_sink`")
    # Step 1: clusters
    head, rows = clusters_of(setup, chosen.spike, ids)
    found = ClusterAttack(spike=chosen.spike.name, length=length, ids=np.array(ids), head=head, clusters=rows)
    if not sequences or not found.heads:
        return found
    # Step 2: sequences
    every, *pools = pools_of(setup, found)
    if max(map(len, pools)) < length:
        warn(f"no cluster has {length} tokens (the largest: {max(map(len, pools))}), so no sequence was tried")
        return found
    drawn = [draw_sequences(some, length, sequences, setup.seed) for some in (pools, [every])]
    return replace(found, attempts=attempts_of(setup, chosen, drawn))


def clusters_of(setup: Setup, spike: Spike, ids: list[int]) -> tuple[PerToken, tuple[Row, ...]]:
    """Find the head of layer 0 that serves each token, which stands alone; NaN for one that no single head serves.

    Args:
        setup: The model and its text.
        spike: The spike of the first token.
        ids: The tokens.

    Returns:
        The heads; and how many tokens have the spike by one head, with all heads and without any, and by which head.
    """
    heads = heads_up_to(setup.target, 0)
    if setup.target.store is not None:  # many passes go through all of these layers
        setup.target.store.resident = spike.peak + 1
    means = means_of(spike, heads)
    parts = list[torch.Tensor]()
    edits = [heads, *(tuple(other for other in heads if other != head) for head in heads)]  # all replaced, then but one
    for tokens in torch.tensor(ids).split(TOKENS):
        along = along_first(spike, tokens, edits, means)
        parts.append(along.double().round(decimals=4))  # threads may change what is beyond
        setup.progress("clusters", TOKENS * (len(parts) - 1) + len(tokens), len(ids))
    intact, none, *alone = torch.cat(parts, 1).numpy()
    has = intact >= HALF
    unneeded = none >= HALF
    by_one = np.full(len(ids), np.nan)
    another = None
    if heads:
        needing = has & ~unneeded
        by_head = np.stack(alone)
        by_one = np.where(needing & (by_head.max(0) >= HALF), by_head.argmax(0), np.nan)
        another = Mean(float((needing & (np.median(by_head, 0) >= HALF)).mean()), kind="share")  # the median head
    rows = [row_of("findings", SERVED, "another head", share=share_of(np.isfinite(by_one)), control=another)]
    rows += [row_of("clusters", name, share=share_of(some)) for name, some in ((INTACT, has), (UNNEEDED, unneeded))]
    for number, count in zip(*np.unique(by_one[np.isfinite(by_one)], return_counts=True), strict=True):
        rows.append(row_of("clusters", str(Head(0, int(number))), tokens=int(count)))
    return by_one, tuple(rows)


def share_of(values: Shaped[Any, " case"]) -> Mean:
    """Return the mean of scores from 0 to 1."""
    scores = np.asarray(values, float)
    return Mean(float(scores.mean()), margin_of(scores, SCORES), kind="share")


def draw_sequences(pools: Sequence[Sequence[int]], length: int, count: int, seed: int) -> TokenRows:
    """Draw `count` sequences of distinct tokens, in turn from each cluster that is large enough."""
    generator = draws(seed, f"attacks of {length} tokens")
    large = [pool for pool in pools if len(pool) >= length]
    return torch.tensor([some_of(large[number % len(large)], length, generator) for number in range(count)])


def pools_of(setup: Setup, found: ClusterAttack) -> list[list[int]]:
    """Return the ids of all tokens, then the ids of each cluster, without special tokens."""
    special = [*setup.tokenizer.all_special_ids, *([] if setup.bos is None else [setup.bos])]
    usable = ~np.isin(found.ids, special)
    return [found.ids[usable & some].tolist() for some in (usable, *(found.head == head for head in found.heads))]


def attempts_of(setup: Setup, chosen: SpikeCircuit, drawn: Sequence[TokenRows]) -> tuple[Row, ...]:
    """Run sequences of clusters and of all tokens without BOS, with and without the patch.

    Args:
        setup: The model and its text.
        chosen: The spike, with its writers.
        drawn: Sequences of tokens of one cluster, and of all tokens.
    """
    patches = dict[str, SinkPatch | None]({"": None})
    rows = list[Row]()
    if setup.target.resident:
        patches[", patched"] = chosen.patch
    for word, patch in patches.items():
        shares: list[Mean] = []
        for ids in drawn:
            with under(patch, setup.target):
                (along,) = along_spikes(setup.target, [chosen.spike], ids)
            shares.append(share_of((along[:, 1:] >= HALF).float().mean(1)))
        rows.append(row_of("findings", f"{POSITIONS}{word}", "random tokens", share=shares[0], control=shares[1]))
        setup.progress("attacks", len(rows), len(patches))
    return tuple(rows)
