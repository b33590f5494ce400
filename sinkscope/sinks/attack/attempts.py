"""Sequences of an attack, and what they and patches do: spikes, attention, the next token (Yona et al., 5.1-5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import kl_div

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.hooks.edit import SinkPatch
from sinkscope.hooks.edit.base import under
from sinkscope.hooks.trace.run import trace
from sinkscope.measure import Setup
from sinkscope.models.draws import draws, some_of
from sinkscope.results.claims import Claim, Outcome
from sinkscope.results.parts import Tokens
from sinkscope.sinks.attack.clusters import TokenClusters
from sinkscope.sinks.patch.patches import Patches, chosen_patch, random_patch
from sinkscope.sinks.repetition.attention import attention_from
from sinkscope.sinks.repetition.sweep import SEQUENCES, claim_of_cases, one_copy
from sinkscope.sinks.spikes.copies import along_spikes
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.tokens import TokenRows

SUCCESS = 0.5  # share of the first token's projection from which a position counts as a sink
TAIL = 16  # tokens of text after an attack, whose attention is read
SOURCES = "cluster", "random"


@dataclass(frozen=True)
class Attempt:
    """Sequences of one source and length behind the same tokens, under one patch or none.

    Attributes:
        patch: "none"; "Listing 1": the paper's patch as printed, which holds the up factor of the sink neurons at its
            value at the second token, even if this is a sink; "patch": that of `patch_make`; "random neurons": as many
            others, held at their values at the second token.
        context: What stands before: "BOS" or "no BOS".
        length: Tokens per sequence.
        source: "cluster": drawn from one cluster each, the clusters in turn; "random": drawn from all tokens.
        positions: Mean share of positions that succeed.
        attention: Share of the attention of the text after the attack that its positions get, without the first
            token of all; mean over heads and layers after the sink layer. None: there is no patch.
        divergence: Kullback-Leibler divergence in nats of the next token after the attack from that without a patch.
            None: there is no patch.
    """

    patch: str
    context: str
    length: int
    source: str
    positions: float
    attention: float | None = None
    divergence: float | None = None


def attack_patches(setup: Setup) -> Patches:
    """No patch, and all others if the model is in memory and has causal neurons; Listing 1 needs an up factor."""
    patches: Patches = {"none": None}
    patch = chosen_patch(setup, None) if setup.target.resident else None
    if patch is not None:
        listing = SinkPatch(sites=patch.sites, site="up")
        with suppress(UnsupportedError), listing.on(setup.target):
            patches["Listing 1"] = listing
        patches |= {"patch": patch, "random neurons": random_patch(setup, patch)}
    return patches


@dataclass(frozen=True)
class Attack:
    """What sequences do, with what stands before them. The first token of all does not count.

    Attributes:
        setup: The model and its text.
        spike: The spike of the first token.
        patches: The patches, by name.
    """

    setup: Setup
    spike: Spike
    patches: Patches

    def spikes(self, ids: TokenRows) -> Float[Tensor, "row attacked"]:
        """Whether positions reach half of the first token's projection on the spike's direction."""
        (along,) = along_spikes(self.setup.target, [self.spike], ids)
        return (along[:, 1:] >= SUCCESS).float()

    def attention(self, ids: TokenRows) -> float:
        """The share of the attention of the text after them that the attacked positions get."""
        end = ids.shape[1]
        ids = torch.cat([ids, self.setup.ids[:1, -TAIL:].expand(len(ids), -1)], 1)
        keys = torch.zeros(*ids.shape, 1)
        keys[:, 1:end] = 1
        received = attention_from(self.setup.target, ids, keys, end)
        return float(received[..., self.spike.first + 1 :].nanmean() / TAIL)

    def tried(self, context: str, source: str, length: int, ids: TokenRows) -> list[Attempt]:
        """What sequences do under each patch."""
        made: list[Attempt] = []
        outputs: list[Tensor] = []
        for name, patch in self.patches.items():
            attention, divergence = None, None
            with under(patch, self.setup.target):
                positions = float(self.spikes(ids).mean())
                if len(self.patches) > 1:
                    attention = self.attention(ids)
                    last = trace(self.setup.target, ids, ["logits"], "last", batch_size=SEQUENCES)
                    outputs.append(last["logits"].float().log_softmax(-1))
                    divergence = float(kl_div(outputs[0], outputs[-1], reduction="batchmean", log_target=True))
            made.append(Attempt(name, context, length, source, positions, attention, divergence))
        return made

    def claim(self, cluster: TokenRows, random: TokenRows) -> Claim:
        """What the tokens of a cluster do without BOS, beside one of them behind random tokens, and these alone."""
        single = self.spikes(one_copy(random, cluster))[:, -1]
        values = torch.stack([self.spikes(cluster).mean(1), single, self.spikes(random).mean(1)])
        outcome = Outcome("spikes", unit="cases", gives="make spikes at {} of their positions {}")
        return claim_of_cases((Tokens("one cluster", cluster.shape[1]),), "without BOS", outcome, values)


def drawn_sequences(pools: Sequence[Sequence[int]], length: int, count: int, seed: int) -> TokenRows:
    """`count` sequences of distinct tokens, each from one cluster of at least `length` tokens, these taken in turn."""
    generator = draws(seed, f"attacks of {length} tokens")
    large = [pool for pool in pools if len(pool) >= length]
    return torch.tensor([some_of(large[number % len(large)], length, generator) for number in range(count)])


def attempts_of(
    attack: Attack, clusters: TokenClusters, lengths: Sequence[int], count: int
) -> tuple[tuple[Attempt, ...], Claim]:
    """What sequences of tokens of the clusters do; the claims are of the longest without BOS.

    Args:
        attack: The model and the patches.
        clusters: The clusters.
        lengths: Tokens per sequence.
        count: Sequences of each kind.

    Raises:
        SinkscopeError: No cluster has so many tokens, or the context does not hold them.
    """
    setup = attack.setup
    left_out = {*setup.tokenizer.all_special_ids, setup.bos}
    everyone, *pools = ([token for token in ids if token not in left_out] for ids in clusters.pools)
    limit = min(max(map(len, pools)), (setup.target.max_positions or 1 << 30) - TAIL - 1)
    lengths = [length for length in sorted({*lengths}) if length <= limit]
    if not lengths:
        raise SinkscopeError(f"--length: the largest cluster, and the context, hold {limit} tokens; give at most that")
    leads: dict[str, list[int]] = {"no BOS": []}
    if setup.bos is not None:
        leads = {"BOS": [setup.bos], **leads}
    attempts: list[Attempt] = []
    drawn: dict[int, list[TokenRows]] = {}
    for length in lengths:
        drawn[length] = [drawn_sequences(each, length, count, setup.seed) for each in (pools, [everyone])]
    for (context, lead), length in product(leads.items(), lengths):
        before = torch.tensor(lead, dtype=torch.long).expand(count, -1)
        for source, rows in zip(SOURCES, drawn[length], strict=True):
            attempts += attack.tried(context, source, length, torch.cat([before, rows], 1))
        setup.progress(f"attacks, {context}", length, lengths[-1])
    return tuple(attempts), attack.claim(*drawn[lengths[-1]])
