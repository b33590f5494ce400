"""What patches do to an attack: spikes, attention to them, and the next token (Yona et al. 2025, 5.1 to 5.3)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from sinkscope.errors import SinkscopeWarning, UnsupportedError
from sinkscope.hooks.edit import SinkPatch
from sinkscope.hooks.trace.run import trace
from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.sinks.find.layer_scan import norms_after
from sinkscope.sinks.patch.evaluate import random_patch, under
from sinkscope.sinks.repetition.probability import chosen_patch
from sinkscope.sinks.tokens import TokenRows
from sinkscope.tap.observers import attention_rows

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


@dataclass(frozen=True)
class PatchedRows:
    """Attacked sequences under one patch.

    Attributes:
        hits: The attacked positions of high norm.
        attention: What these get together from the text after the attack, mean over heads and layers after the spike.
        uniform: What they would get if all visible positions got the same.
        output: Log-probabilities of the token that follows the attack.
    """

    hits: Bool[Tensor, "row attacked"]
    attention: Float[Tensor, " row"]
    uniform: Float[Tensor, " row"]
    output: Float[Tensor, "row vocab"]

    def divergence(self, reference: PatchedRows) -> float:
        """Kullback-Leibler divergence of the next token's distribution from another one, in nats, mean over rows."""
        return float(functional.kl_div(self.output, reference.output, reduction="batchmean", log_target=True))


@torch.no_grad()
def patched_rows(
    setup: Setup, patch: SinkPatch | None, layer: int, least: float, lead: Sequence[int], rows: TokenRows
) -> PatchedRows:
    """Run attacked sequences under a patch, with a piece of typical text after them.

    Args:
        setup: The model and its text.
        patch: The patch.
        layer: The sink layer, after which norms are read.
        least: Norm from which a position has a high norm.
        lead: Tokens before the attack.
        rows: The sequences.
    """
    target = setup.target
    before = repeat(torch.tensor(lead, dtype=torch.long), "pos -> row pos", row=len(rows))
    tail = repeat(setup.ids[0, -TAIL:], "pos -> row pos", row=len(rows))
    ids = torch.cat([before, rows, tail], dim=1)
    start, end = max(len(lead), 1), len(lead) + rows.shape[1]
    layers = [number for number in range(layer + 1, target.n_layers) if target.has_attention(number)]
    attention, output = [], []
    with under(patch, target), warnings.catch_warnings():
        warnings.simplefilter("ignore", SinkscopeWarning)  # Listing 1 spreads the sink, which is what is measured
        hits = norms_after(target, layer, ids, ROWS)[:, start:end] >= least
        high = functional.pad(hits.float(), (start, TAIL))
        for batch, keys in zip(ids.split(ROWS), high.split(ROWS), strict=True):
            received, last = attention_and_output(target, batch, keys, layers, end)
            attention.append(received)
            output.append(last)
    visible = torch.arange(end + 1, end + TAIL + 1)
    return PatchedRows(hits, torch.cat(attention), high.sum(1) * (1 / visible).mean(), torch.cat(output))


def attention_and_output(
    target: Target, ids: TokenRows, keys: Float[Tensor, "row key"], layers: list[int], end: int
) -> tuple[Float[Tensor, " row"], Float[Tensor, "row vocab"]]:
    """Attention from the positions from `end` on to the keys, and the output just before these positions."""
    received = torch.zeros(len(ids))

    def add(_layer: int, first: int, probs: Float[Tensor, "row head query key"]) -> None:
        late = probs[:, :, max(0, end - first) :]
        total = einsum(late, keys.to(late.device), "row head query key, row key -> row")
        received.add_(total.cpu() / (probs.shape[1] * TAIL * len(layers)))

    with attention_rows(target, add, layers=layers):
        output = trace(target, ids, ["logits"], partial(next_token, place=end - 1))["logits"]
    return received, output


def next_token(logits: Float[Tensor, "row pos vocab"], place: int) -> Float[Tensor, "row vocab"]:
    """Log-probabilities of the token after a position."""
    return logits[:, place].float().log_softmax(-1)
