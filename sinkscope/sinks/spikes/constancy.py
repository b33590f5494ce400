"""Why heads read a place: its spike makes one constant of it, whatever the token, the text and the query.

A norm layer stands before the keys, so no length is left of a long state. What is left is its direction, which is one
and the same in all texts: one key that most queries meet with a large score, and one small value. Two numbers say so,
before the first spike of a place and after the spike, each beside an ordinary position:

1. State: cosine between texts whose tokens differ: an ordinary position of each is made such a place.
2. Value: its norm over the typical one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.engine.attention import Attention, AttentionRows
from sinkscope.engine.tap import attention_rows
from sinkscope.measure.margin import margin_of
from sinkscope.models.arithmetic import product
from sinkscope.models.hooks import on_hidden
from sinkscope.models.layers import per_query_head
from sinkscope.models.target import Target
from sinkscope.results.mean import Mean
from sinkscope.sinks.spikes.conditions import TEXTS, ordinary_positions, rows_at
from sinkscope.sinks.spikes.edited import Batch
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.spikes.why_tables import Cause, Constancy, ConstancyKey
from sinkscope.sinks.thresholds import HALF, READS, SMALLEST
from sinkscope.sinks.tokens import TokenRows

States = Float[Tensor, "layer text d_model"]
PerHead = Float[Tensor, "key head text"]


@dataclass(frozen=True, eq=False)
class Readers:
    """The heads that read a spike, where at least half of it enters their layer.

    Attributes:
        heads: Marks them in each layer that has any.
        before: The last layer that attends and that no spike of the place enters.
    """

    heads: Mapping[int, Bool[Tensor, " head"]]
    before: int

    @property
    def count(self) -> int:
        """How many they are."""
        return sum(int(marked.sum()) for marked in self.heads.values())

    @property
    def after(self) -> int:
        """The first layer that has any."""
        return min(self.heads)


@torch.no_grad()
def constancy_of(spike: Spike, first_layer: int, sufficient: Collection[Cause], seed: int) -> list[Constancy]:
    """Measure how constant a spike makes the first token.

    Args:
        spike: The spike, in texts that did not find it.
        first_layer: The first layer of the first spike of the place: what enters it is before.
        sufficient: What makes another position such a place.
        seed: Seed of the ordinary positions.

    Returns:
        States and values; none where no head reads the place, or no other position becomes one.
    """
    readers = readers_of(spike, first_layer)
    if readers is None:
        return []
    ids = spike.survey.ids[:TEXTS]
    positions = ordinary_positions(ids, seed)
    n_layers = max(*readers.heads, spike.peak) + 1
    similarity = similarity_of_states(spike, ids, positions, sufficient, n_layers)
    if similarity is None:
        return []
    norms = norms_of_values(spike.survey.target, ids, positions, readers, n_layers)
    of_states = similarity[[readers.before, readers.after]]
    return [constancy_row(ConstancyKey.STATE, of_states, readers), constancy_row(ConstancyKey.VALUE, norms, readers)]


def readers_of(spike: Spike, first_layer: int) -> Readers | None:
    """Return the heads that read a spike; None: there is none, or no layer attends before the spike.

    Args:
        spike: The spike.
        first_layer: The first layer of the first spike of the place.
    """
    survey = spike.survey
    place = spike.place.mask
    attending = survey.target.attending
    received = survey.received(place).nanmean(-1) > READS
    heads: dict[int, Tensor] = {}
    for layer in attending:
        entering = float(spike.along(survey.entered[layer][place]).mean())
        if layer in spike.reading_layers and entering >= HALF and bool(received[layer].any()):
            heads[layer] = received[layer]
    earlier = [layer for layer in attending if layer <= first_layer]
    return Readers(heads, earlier[-1]) if earlier and heads else None


def similarity_of_states(
    spike: Spike, ids: TokenRows, positions: Int[Tensor, " text"], sufficient: Collection[Cause], n_layers: int
) -> Float[Tensor, "layer case became"] | None:
    """Compare states between texts, at positions that become places of a spike, and at the same as they are.

    Args:
        spike: The spike.
        ids: The texts.
        positions: An ordinary position in each.
        sufficient: What makes it such a place.
        n_layers: Layers that are read.

    Returns:
        None: fewer than two positions become one.
    """
    states = states_of(rows_at([spike], ids, positions, sufficient), n_layers)
    became = spike.along(states[spike.peak + 1]) >= HALF
    if int(became.sum()) < 2:
        return None
    ordinary = states_of(rows_at([spike], ids, positions), n_layers)
    return torch.stack([cosines(states[:, became]), cosines(ordinary[:, became])], 1)


def norms_of_values(
    target: Target, ids: TokenRows, positions: Int[Tensor, " text"], readers: Readers, n_layers: int
) -> Float[Tensor, "when case text"]:
    """Return the norm of the value of the first token and of ordinary ones, over the typical one, mean over heads.

    Before the spike it is the mean over all heads of a layer, after it over those that read.

    Args:
        target: The model.
        ids: The texts.
        positions: An ordinary position in each.
        readers: The heads that read.
        n_layers: Layers that are read.
    """
    keys = torch.stack([torch.zeros_like(positions), positions])
    values: dict[int, PerHead] = {}

    def see(rows: AttentionRows) -> None:
        assert rows.call is not None
        of_process = values_of(rows.call, keys).to(target.device)
        values[rows.layer] = target.shards.gather(of_process, target.n_heads, 1).cpu()

    with attention_rows(target, see, layers=[readers.before, *readers.heads]):
        target.forward(ids, last_layer=n_layers - 1)
    after = torch.cat([values[layer][:, marked] for layer, marked in readers.heads.items()], 1)
    return torch.stack([values[readers.before].nanmean(1), after.nanmean(1)])


def constancy_row(key: ConstancyKey, numbers: Float[Tensor, "when case text"], readers: Readers) -> Constancy:
    """Return the row of what is compared: before and after a spike, at the place and at ordinary positions."""
    before, after = numbers
    return Constancy(
        key=key,
        readers=readers.count,
        since=readers.after,
        beside=readers.before,
        before=Mean(float(before[0].nanmean())),
        after=Mean(float(after[0].nanmean()), margin_of(after[0].numpy())),
        ordinary_before=Mean(float(before[1].nanmean())),
        ordinary_after=Mean(float(after[1].nanmean())),
    )


def values_of(attention: Attention, keys: Int[Tensor, "key text"]) -> PerHead:
    """Return the norm of the value of keys over the typical one."""
    heads = attention.query.shape[1]
    text = torch.arange(keys.shape[1])
    norms = per_query_head(attention.value, heads).float().norm(dim=-1).expand(-1, heads, -1).cpu()
    typical = norms[:, :, 1:].median(-1).values.clamp(min=SMALLEST)
    return torch.stack([(norms[text, :, at] / typical).T for at in keys])


def states_of(batch: Batch, n_layers: int) -> States:
    """Return the state at the position of each row where it enters each of the first layers, and after the last."""
    target = batch.target
    states = list[Tensor]()
    batch = batch.until_place()

    def keep(hidden: Tensor) -> None:
        states.append(hidden.reshape(*batch.ids.shape, -1)[batch.places[:, 0].to(hidden.device)].float().cpu())

    hooks = [on_hidden(target.layers[0], "first", keep)]
    hooks += [on_hidden(target.layers[layer], "post", keep) for layer in range(n_layers)]
    with batch.acting(*hooks):
        target.forward(batch.ids, last_layer=n_layers - 1, **batch.inputs())
    return torch.stack(states)


def cosines(states: States) -> Float[Tensor, "layer text"]:
    """Return the mean cosine of each text's state to the states of all other texts, at the input of each layer."""
    unit = torch.nn.functional.normalize(states, dim=-1)
    return (product(unit, unit.mT).sum(-1) - 1) / (len(unit[0]) - 1)
