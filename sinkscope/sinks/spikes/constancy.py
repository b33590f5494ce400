"""Why heads read a place: its spike makes one constant of it, whatever the token, the text and the query.

A norm layer stands before the keys, so no length is left of a long state. What is left is its direction, which is one
and the same in all texts: one key, which a head can rely on, and one small value. Two numbers say so, before the first
spike of a place and after the spike, each beside an ordinary position:

1. State: cosine between texts whose tokens differ: an ordinary position of each is made such a place.
2. Value: its norm over the typical one, in heads that read the place; before the spike in all heads of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import Attention
from sinkscope.engine.run import Run
from sinkscope.engine.step import Step
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.measure.margin import margin_of
from sinkscope.models.grouped_heads import per_query_head
from sinkscope.models.hooks import Hook, on_hidden, on_input
from sinkscope.results.row import Mean, Row, row_of
from sinkscope.sinks.spikes.asked import ordinary_positions, with_causes
from sinkscope.sinks.spikes.edited import Batch
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.thresholds import HALF, READS, SMALLEST

States = Float[Tensor, "layer text d_model"]


@dataclass(frozen=True, eq=False)
class Keys(Intervention, Actor):
    """Reads values in some layers.

    Attributes:
        at: Positions of the keys in each text.
        layers: The layers.
        values: Norm of the value of each key over the typical one, by layer.
    """

    at: Int[Tensor, "key text"]
    layers: Sequence[int]
    values: dict[int, Float[Tensor, "key head text"]] = field(default_factory=dict)

    def enter(self, run: Run, key: int) -> None:
        """Listen to attention."""
        run.act(self)

    def attends(self, step: Step) -> bool:
        """Return True: every call has keys."""
        return True

    def attend(self, step: Step, attention: Attention) -> None:
        """Read the values of a layer."""
        layer, text = attention.layer, torch.arange(self.at.shape[1])
        if layer not in self.layers:
            return
        heads = attention.query.shape[1]
        norms = per_query_head(attention.value, heads).float().norm(dim=-1).expand(-1, heads, -1).cpu()
        typical = norms[:, :, 1:].median(-1).values.clamp(min=SMALLEST)
        self.values[layer] = torch.stack([(norms[text, :, at] / typical).T for at in self.at])


@torch.no_grad()
def constancy_of(spike: Spike, begins: int, sufficient: Sequence[str], seed: int) -> list[Row]:
    """Measure how constant a spike makes the first token.

    Args:
        spike: The spike, in texts that did not find it.
        begins: The first layer of the first spike of the place: what enters it is before.
        sufficient: What makes another position such a place.
        seed: Seed of the ordinary positions.

    Returns:
        Rows of the table "constant"; none where no head reads the place, or no other position becomes one.
    """
    target = spike.survey.target
    earlier, reading = [layer for layer in target.attending if layer <= begins], reading_heads(spike)
    if not earlier or not reading:
        return []
    first, after, depth = earlier[-1], min(reading), max(*reading, spike.peak) + 1
    # 1. states
    ordinary = ordinary_positions([spike], seed)
    at, states = ordinary.places[0].int().argmax(1), states_of(with_causes(ordinary, sufficient), depth)
    became = spike.along(states[spike.peak + 1]) >= HALF
    if int(became.sum()) < 2:
        return []
    place, ordinary_place = cosines(states[:, became]), cosines(states_of(ordinary, depth)[:, became])
    heads = f"{sum(int(heads.sum()) for heads in reading.values())} heads from layer {after} on, beside layer {first}"
    rows = [constant_of("state", torch.stack([place, ordinary_place], 1)[[first, after]], heads)]
    # 2. values
    keys = Keys(torch.stack([torch.zeros_like(at), at]), [first, *reading])
    with under(keys, target):
        target.forward(ordinary.ids, last_layer=depth - 1)
    behind = torch.cat([keys.values[layer][:, own] for layer, own in reading.items()], 1)
    return [*rows, constant_of("value", torch.stack([keys.values[first].nanmean(1), behind.nanmean(1)]))]


def reading_heads(spike: Spike) -> dict[int, Bool[Tensor, " head"]]:
    """Return the heads that attend to the place, in each layer whose input has at least half of the spike there."""
    survey, place, heads = spike.survey, spike.place.mask, dict[int, Tensor]()
    received = survey.received(place).nanmean(-1)
    for layer in survey.target.attending:
        there = float(spike.along(survey.entered[layer][place]).mean())
        if layer in spike.reading_layers and there >= HALF and bool((received[layer] > READS).any()):
            heads[layer] = received[layer] > READS
    return heads


def states_of(batch: Batch, depth: int) -> States:
    """Return the state at the position of each row where it enters each of the first layers, and after the last."""
    target, states = batch.target, list[Tensor]()
    batch = batch.until_place()

    def keep(hidden: Tensor) -> None:
        states.append(hidden.reshape(*batch.ids.shape, -1)[batch.places[0].to(hidden.device)].float().cpu())

    hooks: list[Hook] = [(target.layers[0], "first", on_input(keep))]
    for layer in range(depth):
        hooks.append((target.layers[layer], "post", on_hidden(keep)))
    with batch.acting(), target.hooks(*hooks):
        target.forward(batch.ids, last_layer=depth - 1, **batch.inputs())
    return torch.stack(states)


def cosines(states: States) -> Float[Tensor, "layer text"]:
    """Return the mean cosine of each text's state to the states of all other texts, at the input of each layer."""
    unit = torch.nn.functional.normalize(states, dim=-1)
    between = unit @ unit.mT
    return (between.sum(-1) - 1) / (len(unit[0]) - 1)


def constant_of(name: str, read: Float[Tensor, "when where text"], note: str = "") -> Row:
    """Return the row of a number: before and after, at the place and at an ordinary position."""
    (before, ordinary_before), (after, ordinary_after) = read.nanmean(-1).tolist()
    margin = margin_of(read[1, 0].numpy())
    numbers = {"ordinary_before": ordinary_before, "ordinary_after": ordinary_after}
    return row_of("constant", name, note, before=before, after=Mean(after, margin), **numbers)
