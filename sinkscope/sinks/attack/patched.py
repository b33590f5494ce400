"""What patches do to an attack: spikes, attention to them, and the next token (Yona et al. 2025, 5.1 to 5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from einops import repeat
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from sinkscope.errors import UnsupportedError
from sinkscope.hooks.edit import SinkPatch
from sinkscope.hooks.trace.run import trace
from sinkscope.measure import Setup
from sinkscope.sinks.find.survey import SinkContext
from sinkscope.sinks.patch.evaluate import random_patch
from sinkscope.sinks.repetition.attention import attention_from
from sinkscope.sinks.repetition.probability import chosen_patch
from sinkscope.sinks.repetition.sweep import norms_at_sink
from sinkscope.sinks.tokens import TokenRows

SUCCESS = 0.5  # share of the spike's norm from which a position counts as a sink
SEQUENCES_AT_ONCE = 64  # sequences per pass
NONE, LISTING, SECOND, PATCH, RANDOM = PATCHES = ("none", "Listing 1", "second value", "patch", "random neurons")
TAIL = 16  # tokens of text after an attack, whose attention is read
ROWS = 4  # sequences per pass; each has attention of every head and all logits


def attack_patches(setup: Setup) -> dict[str, SinkPatch | None]:
    """No patch, and all others if the model is in memory and has causal neurons.

    Where an MLP has no up factor, Listing 1 holds the whole neuron.
    """
    patches: dict[str, SinkPatch | None] = {NONE: None}
    patch = chosen_patch(setup, None) if setup.target.resident else None
    if patch is not None:
        whole = SinkPatch(sites=patch.sites)
        listing = SinkPatch(sites=patch.sites, site="up")
        try:
            with listing.on(setup.target):
                pass
        except UnsupportedError:
            listing = whole
        patches |= {LISTING: listing, SECOND: whole, PATCH: patch, RANDOM: random_patch(setup, patch)}
    return patches


def spikes_of(context: SinkContext, lead: Sequence[int], rows: TokenRows) -> Bool[Tensor, "row attacked"]:
    """Which positions of sequences have at least half of the spike's norm; the model's position 0 is left out.

    Args:
        context: The model at the place of its spike.
        lead: Tokens before the sequences.
        rows: The sequences.
    """
    ids = torch.cat([repeat(torch.tensor(lead, dtype=torch.long), "pos -> row pos", row=len(rows)), rows], dim=1)
    norms = norms_at_sink(context, ids, size=SEQUENCES_AT_ONCE)[:, max(len(lead), 1) :]
    return norms >= SUCCESS * context.scan.spike_norm[context.layer]


@torch.no_grad()
def after_attack(
    setup: Setup, context: SinkContext, lead: Sequence[int], rows: TokenRows, high: Bool[Tensor, "row attacked"]
) -> tuple[float, float, Float[Tensor, "row vocab"]]:
    """What an attack does to the text after it: attention, and the next token.

    Args:
        setup: The model and its text.
        context: The model at the place of its spike.
        lead: Tokens before the attack.
        rows: The sequences.
        high: Their positions of high norm.

    Returns:
        What these positions get together from the text, mean over sequences, heads and layers after the spike; what
        they would get if all visible positions got the same; and log-probabilities of the token after the attack.
    """
    target = setup.target
    ends = [torch.tensor(lead, dtype=torch.long), setup.ids[0, -TAIL:]]
    before, tail = (repeat(ids, "pos -> row pos", row=len(rows)) for ids in ends)
    ids = torch.cat([before, rows, tail], dim=1)
    end = ids.shape[1] - TAIL
    layers = [number for number in range(context.layer + 1, target.n_layers) if target.has_attention(number)]
    keys = functional.pad(high.float(), (end - high.shape[1], TAIL))[..., None]
    received = attention_from(target, ids, keys, end, size=ROWS)[:, 0, layers].sum(1) / (TAIL * len(layers))
    output = trace(target, ids, ["logits"], partial(next_token, place=end - 1), batch_size=ROWS)["logits"]
    uniform = high.float().sum(1).mean() * (1 / torch.arange(end + 1, end + TAIL + 1)).mean()
    return float(received.mean()), float(uniform), output


def next_token(logits: Float[Tensor, "row pos vocab"], place: int) -> Float[Tensor, "row vocab"]:
    """Log-probabilities of the token after a position."""
    return logits[:, place].float().log_softmax(-1)
