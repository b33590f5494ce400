"""Why heads read a place: its spike makes one constant of it, whatever the token, the text and the query.

A norm layer stands before the keys, so no length is left of a long state. What is left is its direction, which is one
and the same in all texts: one key that most queries meet with a large score, and one small value. Two numbers say so,
before the first spike of a place and after the spike, each beside an ordinary position:

1. State: cosine between texts whose tokens differ: an ordinary position of each is made such a place.
2. Value: its norm over the typical one.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.engine.attention import Attention, AttentionRows
from sinkscope.engine.tap import attention_rows
from sinkscope.measure.margin import margin_of
from sinkscope.models.arithmetic import product
from sinkscope.models.hooks import on_hidden
from sinkscope.models.layers import per_query_head
from sinkscope.results.mean import Mean
from sinkscope.sinks.spikes.conditions import TEXTS, ordinary_positions, rows_at
from sinkscope.sinks.spikes.edited import Batch
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.spikes.why_tables import Cause, Constancy, ConstancyKey
from sinkscope.sinks.thresholds import HALF, READS, SMALLEST

States = Float[Tensor, "layer text d_model"]
PerHead = Float[Tensor, "key head text"]


@torch.no_grad()
def constancy_of(spike: Spike, begins: int, sufficient: Collection[Cause], seed: int) -> list[Constancy]:
    """Measure how constant a spike makes the first token.

    Args:
        spike: The spike, in texts that did not find it.
        begins: The first layer of the first spike of the place: what enters it is before.
        sufficient: What makes another position such a place.
        seed: Seed of the ordinary positions.

    Returns:
        States and values; none where no head reads the place, or no other position becomes one.
    """
    survey = spike.survey
    place = spike.place.mask
    reading = dict[int, Tensor]()
    target = survey.target
    received = survey.received(place).nanmean(-1) > READS
    for layer in target.attending:  # whose input has at least half of the spike at the place
        there = float(spike.along(survey.entered[layer][place]).mean())
        if layer in spike.reading_layers and there >= HALF and bool(received[layer].any()):
            reading[layer] = received[layer]
    earlier = [layer for layer in target.attending if layer <= begins]
    if not earlier or not reading:
        return []
    first = earlier[-1]
    after = min(reading)
    depth = max(*reading, spike.peak) + 1
    # 1. states
    ids = survey.ids[:TEXTS]
    at = ordinary_positions(ids, seed)
    states = states_of(rows_at([spike], ids, at, sufficient), depth)
    became = spike.along(states[spike.peak + 1]) >= HALF
    if int(became.sum()) < 2:
        return []
    ordinary = states_of(rows_at([spike], ids, at), depth)
    constant = torch.stack([cosines(some[:, became]) for some in (states, ordinary)], 1)
    readers = sum(int(own.sum()) for own in reading.values())
    # 2. values, in heads that read; before the spike in all heads of a layer
    keys = torch.stack([torch.zeros_like(at), at])
    values = dict[int, PerHead]()

    def see(seen: AttentionRows) -> None:
        assert seen.call is not None
        here = values_of(seen.call, keys).to(target.device)  # of the heads that this process holds
        values[seen.layer] = target.shards.gather(here, target.n_heads, 1).cpu()

    with attention_rows(target, see, layers=[first, *reading]):
        target.forward(ids, last_layer=depth - 1)
    behind = torch.cat([values[layer][:, own] for layer, own in reading.items()], 1)
    norms = torch.stack([values[first].nanmean(1), behind.nanmean(1)])
    found: dict[ConstancyKey, Tensor] = {ConstancyKey.STATE: constant[[first, after]], ConstancyKey.VALUE: norms}
    rows = list[Constancy]()
    for key, (before, behind) in found.items():
        at_place, at_ordinary = behind
        row = Constancy(
            key=key,
            readers=readers,
            since=after,
            beside=first,
            before=Mean(float(before[0].nanmean())),
            after=Mean(float(at_place.nanmean()), margin_of(at_place.numpy())),
            ordinary_before=Mean(float(before[1].nanmean())),
            ordinary_after=Mean(float(at_ordinary.nanmean())),
        )
        rows.append(row)
    return rows


def values_of(attention: Attention, keys: Int[Tensor, "key text"]) -> PerHead:
    """Return the norm of the value of keys over the typical one."""
    heads = attention.query.shape[1]
    text = torch.arange(keys.shape[1])
    norms = per_query_head(attention.value, heads).float().norm(dim=-1).expand(-1, heads, -1).cpu()
    typical = norms[:, :, 1:].median(-1).values.clamp(min=SMALLEST)
    return torch.stack([(norms[text, :, at] / typical).T for at in keys])


def states_of(batch: Batch, depth: int) -> States:
    """Return the state at the position of each row where it enters each of the first layers, and after the last."""
    target = batch.target
    states = list[Tensor]()
    batch = batch.until_place()

    def keep(hidden: Tensor) -> None:
        states.append(hidden.reshape(*batch.ids.shape, -1)[batch.places[:, 0].to(hidden.device)].float().cpu())

    hooks = [on_hidden(target.layers[0], "first", keep)]
    hooks += [on_hidden(target.layers[layer], "post", keep) for layer in range(depth)]
    with batch.acting(*hooks):
        target.forward(batch.ids, last_layer=depth - 1, **batch.inputs())
    return torch.stack(states)


def cosines(states: States) -> Float[Tensor, "layer text"]:
    """Return the mean cosine of each text's state to the states of all other texts, at the input of each layer."""
    unit = torch.nn.functional.normalize(states, dim=-1)
    return (product(unit, unit.mT).sum(-1) - 1) / (len(unit[0]) - 1)
