"""Sequences of an attack, and what they and patches do: spikes, attention, the next token (Yona et al., 5.1-5.3)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.hooks.edit import SinkPatch
from sinkscope.hooks.edit.base import under
from sinkscope.hooks.trace.run import trace
from sinkscope.measure import Setup
from sinkscope.models.checks import check_length
from sinkscope.results.claims import Claims, Outcome
from sinkscope.results.parts import Tokens
from sinkscope.sinks.find.layer_scan import LayerScan
from sinkscope.sinks.patch.patches import Patches, chosen_patch, random_patch
from sinkscope.sinks.repetition.attention import attention_from
from sinkscope.sinks.repetition.sweep import claim_of_cases, norms_at_sink, one_copy
from sinkscope.sinks.tokens import TokenRows

SUCCESS = 0.5  # share of the spike's norm from which a position counts as a sink
SEQUENCES_AT_ONCE = 64  # sequences per pass
NONE, LISTING, PATCH, RANDOM = PATCHES = ("none", "Listing 1", "patch", "random neurons")
SOURCES = ("cluster", "random", "repeated")
WHERE = {"BOS": "after BOS", "no BOS": "without BOS"}
PATCHED = 16  # sequences of each kind that are run under patches
TAIL = 16  # tokens of text after an attack, whose attention is read
ROWS = 4  # sequences per pass; each has attention of every head and all logits


def attack_patches(setup: Setup) -> Patches:
    """No patch, and all others if the model is in memory and has causal neurons.

    Where an MLP has no up factor, Listing 1 holds the whole neuron.
    """
    patches: Patches = {NONE: None}
    patch = chosen_patch(setup, None) if setup.target.resident else None
    if patch is not None:
        listing = SinkPatch(sites=patch.sites, site="up")
        try:
            with listing.on(setup.target):
                pass
        except UnsupportedError:
            listing = SinkPatch(sites=patch.sites)
        patches |= {LISTING: listing, PATCH: patch, RANDOM: random_patch(setup, patch)}
    return patches


@dataclass(frozen=True)
class Attempt:
    """Sequences of one source and length behind the same tokens, under one patch or none.

    Attributes:
        patch: "none"; "Listing 1": the paper's patch as printed, which holds the up factor of the sink neurons at its
            value at the second token, even if this is a sink; "patch": that of `patch_make`; "random neurons": as many
            others, held at their values at the second token.
        context: What stands before: "BOS" or "no BOS".
        length: Tokens per sequence.
        source: How the sequences were made.
        positions: Mean share of positions that succeed.
        most: Share of sequences that succeed at half of their positions or more.
        attention: What the positions that succeed get together from the text after the attack, mean over heads and
            layers after the sink layer. None: it was not read, as there is no patch.
        uniform: What they would get if all visible positions got the same.
        divergence: Kullback-Leibler divergence in nats of the next token after the attack from that under "patch",
            where it is 0 by definition.
    """

    patch: str
    context: str
    length: int
    source: str
    positions: float
    most: float
    attention: float | None = None
    uniform: float | None = None
    divergence: float | None = None


@dataclass(frozen=True)
class Attempts:
    """The sequences that are tried, and what they show.

    Attributes:
        setup: The model and its text.
        scan: The model at the place of its spike.
        leads: What stands before, by name.
        patches: The patches, by name.
        drawn: The sequences of each source, for each length; none if no cluster is large enough.
        shares: Share of the positions of each sequence that succeed, by patch, for a context, length and source.
    """

    setup: Setup
    scan: LayerScan
    leads: Mapping[str, tuple[int, ...]]
    patches: Patches
    drawn: Sequence[Sequence[TokenRows]]
    shares: dict[tuple[str, int, str], list[Tensor]] = field(default_factory=dict)

    def made(self) -> tuple[Attempt, ...]:
        """Attack, and say what happens; by patch, context and length."""
        whole = len(self.leads) * sum(rows.shape[1] for rows in chain(*self.drawn))
        made: list[Attempt] = []
        done = 0
        for sources in self.drawn:
            for source, rows in zip(SOURCES, sources, strict=False):  # none if no cluster is large enough
                for context in self.leads:
                    made += self.show(context, source, rows)
                    done += rows.shape[1]
                    self.setup.progress("attacks", done, whole)
        places = [*product(self.patches, self.leads)]
        return tuple(sorted(made, key=lambda one: (places.index((one.patch, one.context)), one.length)))

    def show(self, context: str, source: str, rows: TokenRows) -> list[Attempt]:
        """What sequences do without a patch, and the first of them under each."""
        lead, length = self.leads[context], rows.shape[1]
        ids, shares = after(lead, rows), self.shares.setdefault((context, length, source), [])
        made: list[Attempt] = []
        outputs: list[Tensor] = []
        for name, patch in self.patches.items():
            with under(patch, self.setup.target):
                high = self.spikes(ids, len(lead))
                by_row = high.double().mean(1)
                most = float((by_row >= 0.5).double().mean())
                one = Attempt(name, context, length, source, float(by_row.mean()), most)
                if len(self.patches) > 1:
                    first = ids[:PATCHED]
                    attention, uniform = self.attention(first, high[:PATCHED])
                    one = replace(one, attention=attention, uniform=uniform)
                    last = trace(
                        self.setup.target, first, ["logits"], lambda logits: logits[:, -1].float(), batch_size=ROWS
                    )
                    outputs.append(last["logits"].log_softmax(-1))
            made.append(one)
            shares.append(by_row.float())
            ids = ids[:PATCHED]
        for number, output in enumerate(outputs):
            ours = outputs[PATCHES.index(PATCH)]
            divergence = functional.kl_div(output, ours, reduction="batchmean", log_target=True)
            made[number] = replace(made[number], divergence=float(divergence))
        return made

    def spikes(self, ids: TokenRows, before: int) -> Bool[Tensor, "row attacked"]:
        """Which positions after the first `before` have at least half of the spike's norm; position 0 is left out."""
        norms = norms_at_sink(self.scan, ids, SEQUENCES_AT_ONCE)[:, max(before, 1) :]
        return norms >= SUCCESS * self.scan.spike_norm[self.scan.layer]

    def attention(self, ids: TokenRows, high: Bool[Tensor, "row attacked"]) -> tuple[float, float]:
        """What positions get together from the text after an attack, and what they would get if all got the same.

        Mean over sequences, heads and layers after the spike.

        Args:
            ids: The sequences with what stands before.
            high: Which of their last positions have a high norm.
        """
        end = ids.shape[1]
        keys = functional.pad(high.float(), (end - high.shape[1], TAIL))[..., None]
        tail = self.setup.ids[:1, -TAIL:].expand(len(ids), -1)
        received = attention_from(self.setup.target, torch.cat([ids, tail], 1), keys, end, ROWS) / TAIL
        uniform = high.float().sum(1).mean() * (1 / torch.arange(end + 1, end + TAIL + 1)).mean()
        return float(received[:, 0, self.scan.layer + 1 :].nanmean(1).mean()), float(uniform)

    def claims(self, best: Attempt) -> Claims:
        """What the tokens of a cluster do in one context and at one length, and what patches leave of that."""
        lead, length, place = self.leads[best.context], best.length, WHERE[best.context]
        rows, others, _ = next(sources for sources in self.drawn if sources and sources[0].shape[1] == length)
        single = self.spikes(after(lead, one_copy(others, rows)), len(lead))[:, -1].float()
        cluster, random, _ = (self.shares[best.context, length, source] for source in SOURCES)
        values = torch.stack([cluster[0], single, random[0]])
        effect, gives = f"the spike at {length} tokens {{}}", "make spikes at {} of their positions {}"
        outcome = Outcome("spikes", unit="cases", effect=effect, gives=gives)
        claims = [claim_of_cases((Tokens("one cluster", length),), place, outcome, values)]
        patch = self.patches.get(PATCH)
        if patch is not None:
            intact, listing, patched, control = (shares[:PATCHED] for shares in cluster)
            edits = ("Listing 1", "held as in Listing 1", listing), ("the patch", "patched", patched)
            for name, edit, left in edits:
                held = replace(outcome, kind=f"spikes under {name}")
                values = torch.stack([left, intact, control])
                claims.append(claim_of_cases(patch.checked_sites, place, held, values, edit=edit))
        return tuple(claims)


def after(lead: Sequence[int], rows: TokenRows) -> Tensor:
    """Sequences with the same tokens before each."""
    return torch.cat([torch.tensor(lead, dtype=torch.long).expand(len(rows), -1), rows], 1)


def attack_contexts(setup: Setup, length: int) -> dict[str, tuple[int, ...]]:
    """What stands before an attack, by name: BOS if there is one, and nothing.

    Args:
        setup: The model and its tokenizer.
        length: Tokens of the longest attack.

    Raises:
        SinkscopeError: The attack does not fit the context.
    """
    contexts: dict[str, tuple[int, ...]] = {}
    if setup.bos is not None:
        contexts["BOS"] = (setup.bos,)
    contexts["no BOS"] = ()
    check_length(setup.target, f"--length {length}", length + len(contexts) - 1, remedy="give a smaller --length")
    return contexts


def make_pools(clusters: Mapping[int, Sequence[int]], vocabulary: int, left_out: set[int]) -> list[Tensor]:
    """The clusters as tensors, without the tokens of `left_out`. Clusters of fewer than two tokens are dropped.

    Raises:
        SinkscopeError: A token does not exist in the model.
    """
    pools = []
    for tokens in clusters.values():
        ids = sorted({int(token) for token in tokens} - left_out)
        if ids and not 0 <= ids[0] <= ids[-1] < vocabulary:
            raise SinkscopeError(
                f"clusters: expected token ids from 0 to {vocabulary - 1}, and not {ids[0]} to {ids[-1]}"
            )
        if len(ids) > 1:
            pools.append(torch.tensor(ids))
    return pools


def drawn_sequences(pools: Sequence[Tensor], length: int, count: int, seed: int) -> TokenRows:
    """`count` sequences of distinct tokens, each from one cluster, the clusters taken in turn.

    No rows if no cluster has `length` tokens.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"draw {seed} {length}".encode()))
    large = [pool for pool in pools if len(pool) >= length]
    if not large:
        return torch.zeros(0, length, dtype=torch.long)
    rows = []
    for number in range(count):
        pool = large[number % len(large)]
        rows.append(pool[torch.randperm(len(pool), generator=generator)[:length]])
    return torch.stack(rows)


def drawn_sources(pools: Sequence[Tensor], everyone: Sequence[Tensor], *draw: int) -> list[TokenRows]:
    """Sequences of each source: of clusters, of all tokens, of one token; none if no cluster is large enough.

    Args:
        pools: The clusters.
        everyone: All tokens, as one cluster.
        draw: Length, count and seed, as of `drawn_sequences`.
    """
    cluster = drawn_sequences(pools, *draw)
    if not len(cluster):
        return []
    return [cluster, drawn_sequences(everyone, *draw), cluster[:, :1].expand_as(cluster)]
