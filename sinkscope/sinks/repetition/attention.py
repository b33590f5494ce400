"""Attention that the sink and repeated tokens receive, by layer (Yona et al. 2025, Fig. 1 and 8)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.results.claims import Outcome
from sinkscope.sinks.repetition.result import Repeat
from sinkscope.sinks.repetition.sweep import Sweep, claim_of_copies
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.tokens import TokenRows
from sinkscope.tap.observers import attention_rows

SEQUENCES = 4  # sequences per pass
TAIL = 64  # tokens of natural text after the repetitions; their attention is read


def read_attention(sweep: Sweep, spike: Spike) -> Repeat:
    """Measure the attention that natural text gives to the place of the spike, and to the copies before it.

    The claim is of the share of all attention that the copies get together in the first layer whose heads can read the
    spike, beside that of the same positions with one copy and in natural text.

    Args:
        sweep: What is repeated; the context has room for the tail.
        spike: The spike.
    """
    setup, target, before = sweep.setup, sweep.setup.target, sweep.before
    place = spike.place
    natural = text_rows(target.tokenizer, setup.text, 1, sweep.rows.shape[1] + TAIL, setup.bos)
    natural[:, :before] = sweep.rows[:1, :before]
    single, _ = sweep.contrasts()
    ids = torch.cat([natural[:, :-TAIL], sweep.rows, single])
    ids = torch.cat([ids, natural[:, -TAIL:].expand(len(ids), -1)], 1)
    there = torch.zeros_like(ids, dtype=torch.bool)
    there[:, before:-TAIL] = True
    keys = torch.stack([place.matches(ids) & ~there, there], 2).float()
    received = attention_from(target, ids, keys, sweep.rows.shape[1], target.forward) / TAIL  # row place layer
    visible = torch.arange(sweep.rows.shape[1], ids.shape[1])[:, None] + 1
    times = received / (keys.cumsum(1)[:, -TAIL:] / visible).mean(1)[..., None]
    count = len(sweep.rows)
    parts = (1, count, count)
    layer = next((one for one in target.attending if one > spike.first), target.attending[-1])
    usual, copies, one = received[:, 1, layer].split(parts)
    outcome = Outcome("attention", (layer,), gives=f"get {{}} of the attention in layer {layer}")
    claim = claim_of_copies(sweep.count, outcome, torch.stack([copies, one, usual.expand(count)]), exact=sweep.named)
    return Repeat(
        quantity="attention",
        claims=(claim,),
        conditions=("natural text", "copies", "one copy"),
        values=torch.stack([part.mean(0) for part in times.split(parts)]).numpy(),
        ids=tuple(sweep.words),
        tokens=(place.words, "the copies' positions"),
        at=np.arange(target.n_layers),
        shown=layer,
    )


@torch.no_grad()
def attention_from(
    target: Target,
    ids: TokenRows,
    keys: Float[Tensor, "row pos kind"],
    begin: int,
    run: Callable[[TokenRows], object],
) -> Float[Tensor, "row kind layer"]:
    """Sum the attention from the positions from `begin` on to kinds of keys over these queries, mean over heads.

    NaN in layers without softmax attention.

    Args:
        target: The model.
        ids: The sequences.
        keys: Which positions belong to which kind; 1 or 0.
        begin: The first of the positions whose attention is read.
        run: Runs some of the sequences through the model.
    """
    received = []
    for rows, kinds in zip(ids.split(SEQUENCES), keys.split(SEQUENCES), strict=True):
        total = torch.full((len(rows), keys.shape[2], target.n_layers), torch.nan)
        total[:, :, target.attending] = 0

        def add(layer: int, _start: int, probs: Tensor, total: Tensor = total, kinds: Tensor = kinds) -> None:
            given = einsum(probs, kinds.to(probs.device), "row head query key, row key kind -> row head kind")
            total[:, :, layer] += target.shards.gather(given, target.n_heads, 1).mean(1).cpu()

        with attention_rows(target, add, whole=False, begin=begin):
            run(rows)
        received.append(total)
    return torch.cat(received)
