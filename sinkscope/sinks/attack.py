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
from jaxtyping import Float, Int, Shaped
from pydantic import Field

from sinkscope.errors import SinkscopeError, UnsupportedError, warn
from sinkscope.hooks.edit import SinkPatch
from sinkscope.hooks.edit.base import under
from sinkscope.measure import Mean, Natural, Result, Setup, Whole, measurement
from sinkscope.measure.margin import SCORES, margin_of
from sinkscope.models.draws import draws, some_of
from sinkscope.models.inputs import check_length
from sinkscope.results.headline import Headline, verdict_of
from sinkscope.results.notation import Head
from sinkscope.results.style import BLUE, bars, figure_of
from sinkscope.results.table import Subject, whole
from sinkscope.sinks.attack_tables import Attempt, AttemptKey, Cluster, HeadsKept, Sequences, TokensWithSpike
from sinkscope.sinks.repeat import along_spikes
from sinkscope.sinks.spikes.effects import SpikeCircuit
from sinkscope.sinks.spikes.find import NO_FIRST_SPIKE, spike_of
from sinkscope.sinks.spikes.marks import along_first, heads_up_to
from sinkscope.sinks.spikes.row_edits import means_of
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.thresholds import HALF
from sinkscope.sinks.tokens import PerToken, TokenRows, sample_tokens, single_token

TOKENS = 128  # tokens of one pass; each takes two more rows than layer 0 has heads


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
        having: How many tokens have the spike with all heads, by one head, by another one, and without any.
        clusters: How many tokens each head serves.
        attempts: In how many positions sequences of one cluster have the spike, beside sequences of all tokens: intact,
            and with the neurons that it needs held at their neutral values. The first position of all does not
            count, because any token there is a first token.
    """

    spike: str
    length: int
    ids: Int[np.ndarray, " token"]
    head: PerToken
    having: tuple[TokensWithSpike, ...]
    clusters: tuple[Cluster, ...] = ()
    attempts: tuple[Attempt, ...] = ()

    @property
    def heads(self) -> list[int]:
        """The heads that serve tokens."""
        return np.unique(self.head[np.isfinite(self.head)]).astype(int).tolist()

    def subjects(self) -> list[Subject]:
        """Return what sequences of one cluster do, and what gives single tokens the spike."""
        title = f"Tokens that become the first token's norm spike ({self.spike}) wherever they stand"
        words = [
            ("tokens", f"{len(self.ids):,} of the vocabulary were tried, each first and alone"),
            ("cluster", "the tokens to which one head of layer 0 gives the spike by itself"),
        ]
        if any(row.key.patched for row in self.attempts):
            words.append(
                ("patch", "holds the neurons that write the spike at their ordinary values, but at position 0")
            )
        return [Subject(title, (*self.attempts, *self.having, *self.clusters), "attack", words=tuple(words))]

    def attempt(self, sequences: Sequences, *, patched: bool = False) -> Attempt | None:
        """Return what sequences do, intact or patched; None: they were not tried."""
        return next((row for row in self.attempts if row.key == AttemptKey(sequences, patched)), None)

    def having_with(self, kept: HeadsKept) -> TokensWithSpike | None:
        """Return how many tokens have the spike with some heads; None: it was not asked."""
        return next((row for row in self.having if row.key is kept), None)

    def conclusion(self) -> str:
        """Say what sequences of one cluster do, or what the clusters are."""
        spike = f"the norm spike of the first token ({self.spike})"
        attempt = self.attempt(Sequences.ONE_CLUSTER)
        control = self.attempt(Sequences.RANDOM)
        if attempt is not None and control is not None:
            begin = f"Sequences of {self.length} different tokens of one cluster have"
            if attempt.share.value - control.share.value <= (attempt.share.margin or 0.0):
                begin = f"Not shown to matter which tokens stand there: {begin[0].lower()}{begin[1:]}"
            words = (
                f"{begin} {spike} at {attempt.text('share')} of their positions, without BOS; as a control, sequences "
                f"of random tokens have it at {control.text('share')}."
            )
            patched = self.attempt(Sequences.ONE_CLUSTER, patched=True)
            if patched is None:
                return words
            share = patched.text("share")
            return f"{words} Under a patch of the neurons that write the spike the former have it at {share}."
        tried = f"{len(self.ids):,} tokens"
        if not self.heads:
            without = self.having_with(HeadsKept.NONE)
            assert without is not None
            return (
                f"No head of layer 0 gives one of {tried} {spike} by itself: {without.text('share')} have it without "
                "any of these heads."
            )
        served = self.having_with(HeadsKept.MARKING)
        another = self.having_with(HeadsKept.ANOTHER)
        assert served is not None
        other = "none" if another is None else another.text("share")
        return (
            f"One head of layer 0 alone gives {served.text('share')} of {tried} {spike}; as a control, another head "
            f"gives it to {other}."
        )

    def headlines(self) -> list[Headline]:
        """Return how many positions of sequences of one cluster have the spike, beside random tokens."""
        attempt = self.attempt(Sequences.ONE_CLUSTER)
        control = self.attempt(Sequences.RANDOM)
        if attempt is None or control is None:
            return []
        verdict = verdict_of(attempt.share.value, control.share.value, attempt.share.margin)
        beside = f"{control.text('share', margin=False)} (random)"
        return [Headline("spikes in one cluster's tokens", attempt.text("share"), beside, verdict)]

    def figure(self) -> go.Figure:
        """Draw the share of positions beside that of random tokens, intact and patched; or else the clusters."""
        fig = go.Figure()
        bars(fig, self.attempts, "share", BLUE)
        if not self.attempts:
            bars(fig, self.clusters, "tokens", BLUE)
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
    """Find the head of layer 0 that marks each token, and try whether different tokens of one head become sinks.

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
    ids = tokens_to_try(setup, tokens, n_tokens)
    if sequences:
        check_length(setup.target, f"--length {length}", length, remedy="give a shorter one")
    chosen = spike_of(setup)
    if chosen is None:
        raise UnsupportedError(f"{NO_FIRST_SPIKE}, so there is nothing to attack: see `why_sink`")
    # Step 1: clusters
    head, having = clusters_of(setup, chosen.spike, ids)
    clusters: list[Cluster] = []
    for number, count in zip(*np.unique(head[np.isfinite(head)], return_counts=True), strict=True):
        clusters.append(Cluster(key=Head(0, int(number)), tokens=whole(int(count))))
    found = ClusterAttack(
        spike=chosen.spike.name, length=length, ids=np.array(ids), head=head, having=having, clusters=tuple(clusters)
    )
    if not sequences or not found.heads:
        return found
    # Step 2: sequences
    all_tokens, *pools = pools_of(setup, found)
    largest = max(map(len, pools))
    if largest < length:
        warn(f"no cluster has {length} tokens (the largest: {largest}), so no sequence was tried")
        return found
    of_clusters = draw_sequences(pools, length, sequences, setup.seed)
    random = draw_sequences([all_tokens], length, sequences, setup.seed)
    return replace(found, attempts=attempts_of(setup, chosen, [of_clusters, random]))


def tokens_to_try(setup: Setup, tokens: Sequence[str] | None, n_tokens: int | None) -> list[int]:
    """Return the ids of some words, or of tokens of the vocabulary, drawn by the seed.

    Args:
        setup: The model and its text.
        tokens: The words.
        n_tokens: How many tokens of the vocabulary.

    Raises:
        SinkscopeError: Both are given, or a word is not one token.
    """
    if tokens and n_tokens is not None:
        raise SinkscopeError("--n-tokens has no effect on tokens that are named: leave it out, or --tokens")
    if tokens:
        return list(dict.fromkeys(single_token(setup.tokenizer, token) for token in tokens))
    n_known = min(len(setup.tokenizer), int(setup.target.config.vocab_size))  # to both tokenizer and embedding
    return sorted(sample_tokens(list(range(n_known)), n_tokens or 256, setup.seed))


def clusters_of(setup: Setup, spike: Spike, ids: list[int]) -> tuple[PerToken, tuple[TokensWithSpike, ...]]:
    """Find the head of layer 0 that serves each token, which stands alone; NaN for one that no single head serves.

    Args:
        setup: The model and its text.
        spike: The spike of the first token.
        ids: The tokens.

    Returns:
        The heads; and how many tokens have the spike with all heads, by one head, by another one, and without any.
    """
    intact, without_heads, *by_head = along_with_one_head(setup, spike, ids)
    has_spike = intact >= HALF
    needs_none = without_heads >= HALF
    serving = np.full(len(ids), np.nan)
    another = None
    if by_head:
        is_served = has_spike & ~needs_none
        along = np.stack(by_head)
        serving = np.where(is_served & (along.max(0) >= HALF), along.argmax(0), np.nan)
        by_median = is_served & (np.median(along, 0) >= HALF)
        another = TokensWithSpike(key=HeadsKept.ANOTHER, share=Mean(float(by_median.mean())))
    rows = [
        TokensWithSpike(key=HeadsKept.ALL, share=share_of(has_spike)),
        TokensWithSpike(key=HeadsKept.MARKING, share=share_of(np.isfinite(serving))),
        TokensWithSpike(key=HeadsKept.NONE, share=share_of(needs_none)),
    ]
    if another is not None:
        rows.append(another)
    return serving, tuple(rows)


def along_with_one_head(setup: Setup, spike: Spike, ids: list[int]) -> Float[np.ndarray, "state token"]:
    """Project tokens, each alone, on a spike's direction: intact, without heads of layer 0, then with each alone.

    Args:
        setup: The model and its text.
        spike: The spike of the first token.
        ids: The tokens.
    """
    heads = heads_up_to(setup.target, 0)
    setup.target.keep_in_memory(spike.peak + 1)  # many passes go through all of these layers
    means = means_of(spike, heads)
    replaced = [heads]
    for head in heads:
        replaced.append(tuple(other for other in heads if other != head))
    parts: list[torch.Tensor] = []
    for tokens in torch.tensor(ids).split(TOKENS):
        along = along_first(spike, tokens, replaced, means)
        parts.append(along.double().round(decimals=4))  # threads may change what is beyond
        setup.progress("clusters", TOKENS * (len(parts) - 1) + len(tokens), len(ids))
    return torch.cat(parts, 1).numpy()


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
    pools = [found.ids[usable].tolist()]
    for head in found.heads:
        pools.append(found.ids[usable & (found.head == head)].tolist())
    return pools


def attempts_of(setup: Setup, chosen: SpikeCircuit, drawn: Sequence[TokenRows]) -> tuple[Attempt, ...]:
    """Run sequences of clusters and of all tokens without BOS, with and without the patch.

    Args:
        setup: The model and its text.
        chosen: The spike, with its writers.
        drawn: Sequences of tokens of one cluster, and of all tokens.
    """
    patches = list[SinkPatch | None]([None])
    rows = list[Attempt]()
    if setup.target.resident:
        patches.append(chosen.patch)
    for number, patch in enumerate(patches, 1):
        for sequences, ids in zip(Sequences, drawn, strict=True):
            with under(patch, setup.target):
                (along,) = along_spikes(setup.target, [chosen.spike], ids)
            share = share_of((along[:, 1:] >= HALF).float().mean(1))
            key = AttemptKey(sequences, patched=patch is not None)
            rows.append(Attempt(key=key, share=share, sequences=whole(len(ids))))
        setup.progress("attacks", number, len(patches))
    return tuple(rows)
